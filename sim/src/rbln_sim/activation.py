# SPDX-License-Identifier: Apache-2.0
"""Putting the simulated runtime where torch-rbln looks for the real one."""

# Standard
import ctypes
import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

LIBRARY_NAME = "librbln.so"
REAL_DISTRIBUTION = "rebel-compiler"

_PACKAGE = Path(__file__).resolve().parent
# An installed wheel carries the library; in a source tree make leaves it in build/.
_LIBRARY_FOLDERS = (_PACKAGE / "lib", _PACKAGE.parents[1] / "build")


def library_path() -> Path:
    """Return the path of the simulated ``librbln.so``.

    Raises:
        RuntimeError: it was not built.
    """
    for folder in _LIBRARY_FOLDERS:
        if (folder / LIBRARY_NAME).is_file():
            return folder / LIBRARY_NAME
    looked = ", ".join(str(folder) for folder in _LIBRARY_FOLDERS)
    raise RuntimeError(
        f"{LIBRARY_NAME} was not found in {looked}; build it with `make` in the "
        f"simulator's source folder"
    )


def site_folder() -> Path:
    """Return the folder that holds the simulated ``rebel`` package."""
    return _PACKAGE / "site"


def refuse_real_runtime() -> None:
    """Raise if this environment has the vendor's runtime.

    Raises:
        RuntimeError: a ``rebel-compiler`` distribution is installed.
    """
    try:
        real = distribution(REAL_DISTRIBUTION)
    except PackageNotFoundError:
        return
    raise RuntimeError(
        f"{REAL_DISTRIBUTION} {real.version} is installed for {sys.executable}: the "
        f"simulated NPU is not used where a real one may be. Use an environment "
        f"without {REAL_DISTRIBUTION}"
    )


def _prepended(entry: str, value: str | None) -> str:
    rest = [part for part in (value or "").split(os.pathsep) if part and part != entry]
    return os.pathsep.join([entry, *rest])


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child process that shall use the simulated NPU.

    Args:
        base: Environment to start from; this process's by default.

    Returns:
        A copy of ``base`` in which ``LD_LIBRARY_PATH`` begins with the folder of the
        simulated library, ``PYTHONPATH`` with that of the simulated ``rebel``, and
        ``PATH`` with that of the simulated ``rbln-smi``.

    Raises:
        RuntimeError: a real ``rebel-compiler`` is installed, or the library was not
            built.
    """
    refuse_real_runtime()
    result = dict(os.environ if base is None else base)
    for name, entry, default in (
        ("LD_LIBRARY_PATH", library_path().parent, None),
        ("PYTHONPATH", site_folder(), None),
        ("PATH", site_folder() / "bin", os.defpath),
    ):
        result[name] = _prepended(str(entry), result.get(name, default))
    return result


def check_settings() -> None:
    """Check the ``RBLN_SIM_*`` settings and the visible NPUs of this process.

    Loads the simulated library, but opens no NPU.

    Raises:
        RuntimeError: a setting is wrong; the message names it.
    """
    reason = ctypes.create_string_buffer(1024)
    library = ctypes.CDLL(str(library_path()))
    if library.rbln_sim_check(reason, ctypes.c_uint64(len(reason))) != 0:
        raise RuntimeError(reason.value.decode(errors="replace"))


def activate() -> None:
    """Use the simulated NPU in this process and the ones it starts.

    Call it before ``import torch``: torch loads torch-rbln, which looks for the runtime
    then.

    Raises:
        RuntimeError: torch is imported already, a real ``rebel-compiler`` is installed,
            the library was not built, or a setting is wrong.
    """
    if "torch" in sys.modules:
        raise RuntimeError(
            "rbln_sim.activate() came too late: torch is imported already. Call it "
            "before the first `import torch`, or run the program with "
            "`rbln-sim exec -- COMMAND`"
        )
    child_environment = environment()
    check_settings()
    os.environ.update(child_environment)
    if str(site_folder()) not in sys.path:
        sys.path.insert(0, str(site_folder()))
