# SPDX-License-Identifier: Apache-2.0
"""Which way between paged blocks and host memory is cheaper.

*Direct* copies cross the host link with one descriptor per segment. *Collected* ones
meet in device memory first, and cross it with one descriptor per staging buffer. That
costs a copy inside the device, and pays when segments are small.

The bandwidth is a known figure of the hardware. The fixed cost of a descriptor belongs
to the driver, so it is measured, once a process and device.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable
import threading

# Third Party
import torch

# First Party
from lmcache.logging import init_logger

logger = init_logger(__name__)

#: Known fixed time of a copy between host and device, in microseconds. That of a copy
#: inside the device is not known, and counts as none.
HARDWARE_DESCRIPTOR_US = 17.0
#: Throughput of copies inside the device, in bytes per microsecond.
_DEVICE_BYTES_PER_US = 240e3
#: Host copies that take less than this many times as long as those inside the device
#: may only seem to.
_TELLING = 2.0
#: A fixed cost of more microseconds is not that of a free link.
_PLAUSIBLE_US = 100.0

_measured: dict[torch.device, float] = {}
_measuring = threading.Lock()


def collecting_pays(
    num_bytes: int, segments: int, buffer_bytes: int, descriptor_us: float
) -> bool:
    """Return whether segments are better collected in device memory.

    Args:
        num_bytes: Bytes of the whole transfer.
        segments: Contiguous segments they lie in.
        buffer_bytes: Bytes of a staging buffer.
        descriptor_us: Fixed time of a copy between host and device.
    """
    saved = segments - -(-num_bytes // buffer_bytes)
    return num_bytes / _DEVICE_BYTES_PER_US < saved * descriptor_us


def known_us(device: torch.device) -> float | None:
    """Return the fixed time of a copy to the host, once it is measured."""
    return _measured.get(device)


def measured_us(
    device: torch.device, copy_times: Callable[[], tuple[float, float]]
) -> float | None:
    """Return the fixed time of a copy to the host, measured by the first who asks.

    Others don't wait for it.

    Args:
        device: The device.
        copy_times: Measures the microseconds of a small copy to the host, and of one
            inside the device. What it raises is passed on.

    Returns:
        Microseconds, or None while another thread measures.
    """
    if device not in _measured and _measuring.acquire(blocking=False):
        try:
            host_us, device_us = copy_times()
            # What both take is the software's time, during which the link is free.
            link_us = host_us - device_us
            if host_us <= _TELLING * device_us:
                link_us = 0.0
            elif link_us > _PLAUSIBLE_US:
                # Other copies were in the way all the time.
                link_us = HARDWARE_DESCRIPTOR_US
            _measured[device] = link_us
            logger.debug(
                "RBLN copies on %s take %.1f us each to the host, %.1f us inside the "
                "device; small pieces are collected in device memory where that pays",
                device,
                host_us,
                device_us,
            )
        finally:
            _measuring.release()
    return _measured.get(device)
