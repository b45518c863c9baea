# SPDX-License-Identifier: Apache-2.0
"""Builds librbln.so with make and ships it inside the package."""

# Standard
import shutil
import subprocess
from pathlib import Path

# Third Party
from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithLibrary(build_py):
    """build_py that also builds librbln.so.

    An editable install finds the library in ``build/``, where make left it.
    """

    def run(self) -> None:
        subprocess.run(["make", "-C", str(ROOT)], check=True)
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "rbln_sim" / "lib"
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / "build" / "librbln.so", target)


class PlatformDistribution(Distribution):
    """A distribution whose wheel is bound to this platform."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    cmdclass={"build_py": BuildWithLibrary},
    distclass=PlatformDistribution,
    # build/ is make's. A hidden folder, since linters would see every module twice.
    options={"build": {"build_base": ".wheel"}},
)
