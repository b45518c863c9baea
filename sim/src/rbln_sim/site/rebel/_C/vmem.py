# SPDX-License-Identifier: Apache-2.0
"""Device memory as direct storage sees it: buffers behind a device address."""

from dataclasses import dataclass

from .. import _device
from .._unsupported import missing_attribute

__all__ = ["Buffer", "get_device_buffers", "sync_to_device"]


@dataclass(frozen=True)
class Buffer:
    """A whole piece of device memory.

    Attributes:
        vaddr: Its device address.
        size: Its size in bytes.
    """

    vaddr: int
    size: int


def get_device_buffers(vaddr: int) -> list[Buffer]:
    """Return the buffers behind a device address.

    Always one here: an entry that is spread over several NPUs is not simulated. It
    must not be used after the tensor was freed.

    Args:
        vaddr: ``data_ptr()`` of a tensor that covers its storage.

    Raises:
        ValueError: The address is inside of an allocation.
        RuntimeError: It is in no allocation.
    """
    base, size = _device.allocation_of(vaddr)
    if base != vaddr:
        raise ValueError(
            f"{vaddr:#x} lies {vaddr - base} bytes inside an allocation; direct "
            "storage moves whole buffers: use a tensor that covers its storage"
        )
    return [Buffer(base, size)]


def sync_to_device(vaddr: int) -> None:
    """Bring bytes that the host wrote last into device memory.

    Args:
        vaddr: Device address of an allocation.

    Raises:
        RuntimeError: It is in no allocation, or the device is lost or full.
    """
    _device.device_bytes(*_device.allocation_of(vaddr))


__getattr__ = missing_attribute("rebel._C.vmem")
