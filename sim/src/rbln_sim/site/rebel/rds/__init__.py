# SPDX-License-Identifier: Apache-2.0
"""Direct storage between NPU and NVMe, over a file opened with O_DIRECT.

No public documentation of the real module exists: names and rules are those of
Rebellions' user documentation and of call sites, everything else is assumed (see the
README of the simulated `rebel`).
"""

from .. import _device
from .._unsupported import missing_attribute
from ._chunk import Chunk, Stream
from ._service import service

__all__ = [
    "Chunk",
    "Stream",
    "is_available",
    "mark_device_updated",
    "query_available_device_count",
]


def is_available() -> bool:
    """Tell whether the storage service runs and has a device. Never raises."""
    return query_available_device_count() > 0


def query_available_device_count() -> int:
    """Return the number of NVMe devices of the storage service: 0 or 1."""
    try:
        return 1 if service().capacity else 0
    except (OSError, ValueError):
        return 0


def mark_device_updated(data_ptr: int) -> None:
    """Tell the runtime that device bytes changed behind its back.

    Needed after reads on a :class:`Stream`; until then the host sees poison.

    Args:
        data_ptr: Device address.

    Raises:
        RuntimeError: There is no live allocation at the address.
    """
    _device.set_host_view_known(data_ptr, True)


__getattr__ = missing_attribute("rebel.rds")
