# SPDX-License-Identifier: Apache-2.0
"""Keeps a torch-rbln that lacks its runtime from breaking ``import torch``.

torch imports torch-rbln as one of its backends, and fails as a whole if that fails.
LMCache then imports torch without its backends: where it is free to choose, to go on
with another device; where RBLN is asked for, to end with the reason. (A torch that is
imported twice crashes the process at its end.) That works for the first import of
torch in a process only, so it is done here: LMCache's scan for devices imports this
module, whose name sorts first, before any backend. A program that imported torch
earlier has met the failure already.
"""

# Standard
import importlib.util
import os
import sys

BACKEND_ENV_VAR = "LMCACHE_DEVICE_BACKEND"
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def is_pinned() -> bool:
    """Return whether ``LMCACHE_DEVICE_BACKEND`` leaves LMCache no other device."""
    return os.environ.get(BACKEND_ENV_VAR, "").strip().lower() == "rbln"


def missing_runtime() -> str | None:
    """Tell why torch-rbln can't find its runtime, without loading either.

    Returns:
        torch-rbln's own explanation, or None if it is not installed, finds a runtime
        or has one loaded.
    """
    if importlib.util.find_spec("torch_rbln") is None:
        return None
    try:
        # Third Party
        from torch_rbln._internal.rbln_runtime_lib import (
            loaded_runtime_libraries,
            resolve_runtime_library,
        )
    except ImportError:
        # Another torch-rbln; its own message must do.
        return None
    except OSError as error:
        # Where torch is imported without its backends, torch-rbln loads its runtime
        # right now.
        return str(error)
    if loaded_runtime_libraries():
        return None
    try:
        resolve_runtime_library()
    except OSError as error:
        return str(error)
    return None


def _import_torch_without_backends() -> None:
    """Import torch, if it is not yet, with its backends left out this once."""
    if "torch" in sys.modules or _AUTOLOAD in os.environ:
        return
    if missing_runtime() is None:
        return
    os.environ[_AUTOLOAD] = "0"
    try:
        # Third Party
        import torch  # noqa: F401
    finally:
        del os.environ[_AUTOLOAD]


_import_torch_without_backends()
