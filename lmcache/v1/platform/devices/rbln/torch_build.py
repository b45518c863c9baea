# SPDX-License-Identifier: Apache-2.0
"""The torch that LMCache's native extensions were compiled for.

Extensions and torch must be of one build. With another one the failure would be an
undefined symbol at best, and LMCache turns that into a warning and a mode in which
only its command line works.
"""

# Standard
import importlib.metadata
import sys

# First Party
from lmcache.v1.platform.devices.rbln.built_with import TORCH_VERSION


def require_built_torch() -> None:
    """Refuse to go on with another torch than the one of the build.

    torch is not imported: it may be the very thing that cannot be. Without any torch
    nothing is refused; LMCache's command line works without.

    Raises:
        RuntimeError: The versions differ; the message names both.
    """
    loaded = getattr(sys.modules.get("torch"), "__version__", None)
    try:
        running = str(loaded or importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return
    if running != TORCH_VERSION:
        raise RuntimeError(
            f"this LMCache was built for torch {TORCH_VERSION}, got torch {running}. "
            f"Install torch {TORCH_VERSION}, or build LMCache again where torch "
            f"{running} is installed"
        )
