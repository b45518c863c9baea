# SPDX-License-Identifier: Apache-2.0
"""The native extension that moves the bytes of transfers."""

# Future
from __future__ import annotations

# Standard
from types import ModuleType
import functools
import importlib

#: Which arguments its functions take; the extension says which ones it was built with.
INTERFACE = 4


@functools.cache
def kv_transpose() -> ModuleType:
    """Return ``lmcache.kv_transpose``.

    Raises:
        ImportError: If it is missing or of another build; the message has the reason
            and the command that mends it.
    """
    try:
        native = importlib.import_module("lmcache.kv_transpose")
        built = getattr(native, "INTERFACE", None)
    except Exception as exc:
        # An extension of another build may raise anything.
        raise _unusable(f"it can't be imported: {exc}") from exc
    if built != INTERFACE:
        raise _unusable(
            f"it is of another LMCache, with interface {built} in place of {INTERFACE}"
        )
    return native


def _unusable(reason: str) -> ImportError:
    return ImportError(
        "RBLN transfers need LMCache's native extension lmcache.kv_transpose, but "
        f"{reason}. Install a wheel of this LMCache for this Python and torch: "
        "pip install --force-reinstall --no-deps lmcache==0.5.6+rbln --find-links DIR, "
        "or build it where torch is installed: "
        "pip install --no-deps --no-build-isolation -e ."
    )
