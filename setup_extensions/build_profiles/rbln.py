# SPDX-License-Identifier: Apache-2.0
"""Build profile of the Rebellions RBLN backend.

The backend moves KV through torch operations, so the profile adds no extension of its
own to LMCache's common ones. ``torch_rbln`` is looked for and never imported: its
import fails where the vendor's runtime is not installed, as on most build machines.
"""

# Standard
from typing import TYPE_CHECKING
import importlib.util

if TYPE_CHECKING:
    # Third Party
    from setuptools.extension import Extension

# First Party
from setup_extensions.build_profiles import BuildProfile


class RblnProfile(BuildProfile):
    """Common C++ extensions for the torch that RBLN runs with."""

    name = "rbln"
    env_var = "BUILD_WITH_RBLN"

    def detect(self) -> bool:
        """Tell whether ``torch_rbln`` is installed.

        Returns:
            True if Python would find the package.
        """
        try:
            return importlib.util.find_spec("torch_rbln") is not None
        except ValueError:  # an import hook or test put a bare entry in sys.modules
            return False

    def build(self) -> tuple[list["Extension"], dict]:
        """Return what RBLN adds to the build.

        Returns:
            No extension, and the ``build_ext`` that keeps compiled ones.
        """
        # First Party
        from setup_extensions.native_cache import CachedBuildExtension

        return [], {"build_ext": CachedBuildExtension}

    def requirements_file(self) -> str | None:
        """Name the list of requirements that RBLN adds.

        Returns:
            A file below ``requirements/``. LMCache reads the extras only if there is
            such a file; this one is empty.
        """
        return "rbln.txt"

    def extras_requirements(self) -> dict[str, str]:
        """Name the optional parts that LMCache would otherwise always install.

        Returns:
            Extra name to file below ``requirements/``.
        """
        return {
            "bigtable": "rbln_bigtable.txt",
            "grpc-metrics": "rbln_grpc_metrics.txt",
            "s3": "rbln_s3.txt",
        }
