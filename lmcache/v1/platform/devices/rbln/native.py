# SPDX-License-Identifier: Apache-2.0
"""The native extension of transfers, or the reason why there is none."""

# Future
from __future__ import annotations

# Standard
from types import ModuleType
import importlib

# First Party
from lmcache.logging import init_logger
from lmcache.v1.platform.devices.rbln.staging import once

logger = init_logger(__name__)

#: Which arguments its functions take, and the columns of its two tables; the extension
#: says which ones it was built with.
INTERFACE = 2
TILE_COLUMNS = (
    "staged",
    "chunk",
    "layer",
    "plane",
    "planes",
    "token",
    "blocks",
    "slots",
    "head",
    "heads",
)
PIECE_COLUMNS = (
    "chunk",
    "block",
    "blocks",
    "plane",
    "planes",
    "head",
    "heads",
    "slot",
    "slots",
    "token",
)


@once
def kv_transpose() -> ModuleType | None:
    """Return ``lmcache.kv_transpose``, or None and one warning that says why."""
    try:
        native = importlib.import_module("lmcache.kv_transpose")
        interface = getattr(native, "INTERFACE", 1)
        columns = tuple(native.TILE_COLUMNS), tuple(native.PIECE_COLUMNS)
        if (interface, *columns) == (INTERFACE, TILE_COLUMNS, PIECE_COLUMNS):
            return native
        reason = (
            f"it is of another LMCache, with interface {interface} in place of "
            f"{INTERFACE}, tiles of {', '.join(columns[0])} and pieces of "
            f"{', '.join(columns[1])}"
        )
    except Exception as exc:
        # Whatever an extension of another build raises, torch can do the work instead.
        reason = f"it can't be imported: {exc}"
    logger.warning(
        "KV blocks are copied and transposed by torch and Python, several times "
        "slower, without the extension lmcache.kv_transpose: %s. Install a wheel of "
        "this LMCache that was built for this Python and torch",
        reason,
    )
    return None
