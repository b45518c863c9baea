# SPDX-License-Identifier: Apache-2.0
"""Which way between paged blocks and host memory is cheaper.

*Direct* copies cross the host link with one descriptor per piece. *Device-staged* ones
collect the pieces in device memory first, and cross it with one descriptor per staging
buffer. That costs a copy inside the device, and pays when pieces are small.

The bandwidths are known figures of the hardware. The fixed costs belong to the driver,
so they are measured, once a process and device.
"""

# Future
from __future__ import annotations

# Standard
from collections import defaultdict
from dataclasses import dataclass
from typing import Any
import threading
import time

# Third Party
import torch

# First Party
from lmcache.logging import init_logger

logger = init_logger(__name__)

#: Contiguous copies between device and pinned host memory, in GB/s. A known figure of
#: the hardware (design: "Speed").
HOST_GBPS = 58.0
#: Copies inside the device, in GB/s. From the same source.
DEVICE_GBPS = 240.0


@dataclass(frozen=True)
class CopyCosts:
    """What copies cost.

    Attributes:
        host_descriptor_us: Fixed time of a copy between host and device, in
            microseconds; about 17 on hardware.
        device_descriptor_us: Fixed time of a copy inside the device. No figure of it
            is known.
        host_gbps: Throughput of the host link.
        device_gbps: Throughput of copies inside the device.
    """

    host_descriptor_us: float
    device_descriptor_us: float
    host_gbps: float = HOST_GBPS
    device_gbps: float = DEVICE_GBPS

    def direct_us(self, num_bytes: int, pieces: int) -> float:
        """Return the time of direct copies.

        Args:
            num_bytes: Bytes of the whole transfer.
            pieces: Contiguous pieces they lie in.

        Returns:
            Microseconds.
        """
        return pieces * self.host_descriptor_us + num_bytes / (self.host_gbps * 1e3)

    def device_staged_us(self, num_bytes: int, pieces: int, buffer_bytes: int) -> float:
        """Return the time of device-staged copies, both on one stream.

        Args:
            num_bytes: Bytes of the whole transfer.
            pieces: Contiguous pieces they lie in.
            buffer_bytes: Bytes of a staging buffer.

        Returns:
            Microseconds.
        """
        inside = pieces * self.device_descriptor_us + num_bytes / (
            self.device_gbps * 1e3
        )
        return inside + self.direct_us(num_bytes, -(-num_bytes // buffer_bytes))


#: The known figures; copies inside the device are taken for free until measured.
HARDWARE_COSTS = CopyCosts(host_descriptor_us=17.0, device_descriptor_us=0.0)

#: Copies of one measurement, and their size in bytes: their time is fixed cost. They
#: are many, since the first one may have to wake the driver.
_PROBES = 32
#: Copies of the first one, which shows whether the others would take too long.
_FIRST_PROBES = 4
_PROBE_BYTES = 4096
_ROUNDS = 12
#: Where copies take longer, in microseconds each, the fixed cost is lost in what makes
#: them so slow: another round would tell no more, and hold transfers up.
_HOPELESS_US = 6000.0
#: Host copies that take less than this many times as long may only seem to.
_TELLING = 2.0
#: A fixed cost of more microseconds is not that of a free link; 17 are known.
_PLAUSIBLE_US = 100.0

_measured: dict[torch.device, CopyCosts] = {}
_measuring: defaultdict[torch.device, threading.Lock] = defaultdict(threading.Lock)


def known_costs(device: torch.device) -> CopyCosts | None:
    """Return the fixed costs of copies on a device, once they are measured."""
    return _measured.get(device)


def measured_costs(
    source: torch.Tensor, pinned: torch.Tensor, buffer: torch.Tensor, stream: Any
) -> CopyCosts | None:
    """Return the fixed costs of copies on a device, measured by the first who asks.

    Others don't wait for it. When it returns no copy is in flight.

    Args:
        source: Device memory to read, 1-D and contiguous.
        pinned: Host staging to write, uint8.
        buffer: Device staging to write, of the source's dtype.
        stream: Stream of the copies, for the caller alone.

    Returns:
        The costs of the source's device, or None while another thread measures them.

    Raises:
        RuntimeError: A copy failed; others may be in flight.
    """
    device = source.device
    lock = _measuring[device]
    if device not in _measured and lock.acquire(blocking=False):
        try:
            inside = source[: max(1, _PROBE_BYTES // source.element_size())]
            host = pinned[: inside.nbytes].view(source.dtype)
            _measured[device] = _measure(host, buffer[: inside.numel()], inside, stream)
        finally:
            lock.release()
    return _measured.get(device)


def _measure(
    host: torch.Tensor, inside: torch.Tensor, source: torch.Tensor, stream: Any
) -> CopyCosts:
    """Measure some rounds; others can only make a copy slower, so minima count."""
    host_us = device_us = float("inf")
    for attempt in range(_ROUNDS):
        probes = _PROBES if attempt else _FIRST_PROBES
        to_host = _fixed_us(host, source, probes, stream)
        within = _fixed_us(inside, source, probes, stream)
        host_us, device_us = min(host_us, to_host), min(device_us, within)
        if to_host + within > _HOPELESS_US:
            break
    # What both take is the software's time, during which the link is free.
    link_us = host_us - device_us
    if host_us <= _TELLING * device_us:
        link_us = 0.0
    elif link_us > _PLAUSIBLE_US:
        # Other copies were in the way all the time.
        link_us = HARDWARE_COSTS.host_descriptor_us
    logger.debug(
        "RBLN copies on %s take %.1f us each to the host, %.1f us inside the device; "
        "small pieces are collected in device memory where that pays",
        source.device,
        host_us,
        device_us,
    )
    return CopyCosts(host_descriptor_us=link_us, device_descriptor_us=0.0)


def _fixed_us(
    target: torch.Tensor, source: torch.Tensor, copies: int, stream: Any
) -> float:
    """Return the time of one small copy among several, in microseconds."""
    stream.synchronize()
    start = time.perf_counter()
    with torch.rbln.stream(stream):  # type: ignore[attr-defined]
        for _ in range(copies):
            target.copy_(source, non_blocking=True)
    stream.synchronize()
    return (time.perf_counter() - start) / copies * 1e6
