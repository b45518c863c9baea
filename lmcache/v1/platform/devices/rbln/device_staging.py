# SPDX-License-Identifier: Apache-2.0
"""Device memory in which small pieces are collected, and what copies cost there.

The buffers are bound device memory, in a bounded pool per device and dtype like those
of the host. A transfer uses one: its copies are in order on one stream, so the next
pieces can't overwrite it before the host copy has read it.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable
import atexit
import threading
import time

# Third Party
import torch

# First Party
from lmcache.logging import init_logger
from lmcache.v1.platform.devices.rbln import staging
from lmcache.v1.platform.devices.rbln.copy_costs import HARDWARE_COSTS, CopyCosts
from lmcache.v1.platform.devices.rbln.staging import StagingPool

logger = init_logger(__name__)

#: Buffers of a device and dtype at most: LMCache stores with four threads.
DEVICE_BUFFERS = 4

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
#: Transfers that measure at most, where none is ever alone.
_ATTEMPTS = 8

_lock = threading.Lock()
_pools: dict[tuple[torch.device, torch.dtype], StagingPool] = {}
_measured: dict[torch.device, CopyCosts] = {}
_measurements: dict[torch.device, _Measurement] = {}


def device_pool(device: torch.device, dtype: torch.dtype) -> StagingPool:
    """Return the pool of device buffers, ``BUFFER_BYTES`` each, made on demand.

    Args:
        device: Where the buffers are.
        dtype: Their element type; torch-rbln tracks one per allocation.

    Returns:
        The pool of this process; it is closed at exit.
    """

    def make_buffer() -> torch.Tensor:
        buffer = torch.empty(
            staging.BUFFER_BYTES // dtype.itemsize, dtype=dtype, device=device
        )
        torch.rbln.bind_device_memory(buffer)  # type: ignore[attr-defined]
        return buffer

    with _lock:
        pool = _pools.get((device, dtype))
        if pool is None:
            pool = _pools[device, dtype] = StagingPool(DEVICE_BUFFERS, make_buffer)
            # Device memory goes back before torch-rbln shuts its runtime down.
            atexit.register(pool.close)
        return pool


class _Measurement:
    """The least times of copies on one device so far."""

    def __init__(self) -> None:
        self.running = threading.Lock()
        self.attempts = 0
        self.hopeless = False
        self.host_us = self.device_us = float("inf")

    def take(self, host: torch.Tensor, inside: torch.Tensor, src: torch.Tensor) -> None:
        """Measure some rounds; others can only make a copy slower, so minima count."""
        self.attempts += 1
        for attempt in range(_ROUNDS):
            probes = _PROBES if attempt else _FIRST_PROBES
            host_us = _fixed_us(host, src, probes)
            device_us = _fixed_us(inside, src, probes)
            self.host_us = min(self.host_us, host_us)
            self.device_us = min(self.device_us, device_us)
            if host_us + device_us > _HOPELESS_US:
                self.hopeless = True
                return

    def costs(self) -> CopyCosts:
        """Return the costs that the times show."""
        # What both take is the software's time, during which the link is free.
        link_us = self.host_us - self.device_us
        if self.host_us <= _TELLING * self.device_us:
            link_us = 0.0
        elif link_us > _PLAUSIBLE_US:
            # Other copies were in the way all the time.
            link_us = HARDWARE_COSTS.host_descriptor_us
        return CopyCosts(host_descriptor_us=link_us, device_descriptor_us=0.0)


def known_costs(device: torch.device) -> CopyCosts | None:
    """Return the fixed costs of copies on a device once they are measured for good."""
    return _measured.get(device)


def measured_costs(
    region: torch.Tensor,
    pinned: torch.Tensor,
    buffer: torch.Tensor,
    alone: Callable[[], bool],
) -> CopyCosts | None:
    """Return the fixed costs of copies on the device, measured once a process.

    They belong to the driver more than to the hardware, so they are not assumed. One
    thread measures at a time, and waits for its current stream; others don't wait for
    it. What was measured beside other transfers is preliminary: the next transfers
    measure again, a few at most, and the least times count.

    Args:
        region: Device memory to read, 1-D and contiguous.
        pinned: Host staging to write, uint8.
        buffer: Device staging to write, of the region's dtype.
        alone: Tells whether no other transfer is under way.

    Returns:
        The costs of the region's device, or None while another thread measures them.
    """
    device = region.device
    costs = _measured.get(device)
    if costs is not None:
        return costs
    with _lock:
        measurement = _measurements.setdefault(device, _Measurement())
    if not measurement.running.acquire(blocking=False):
        return None
    try:
        if device in _measured:
            return _measured[device]
        source = region[: max(1, _PROBE_BYTES // region.element_size())]
        host = pinned[: source.nbytes].view(source.dtype)
        quiet = alone()
        measurement.take(host, buffer[: source.numel()], source)
        costs = measurement.costs()
        enough = measurement.hopeless or measurement.attempts >= _ATTEMPTS
        if enough or (quiet and alone()):
            _measured[device] = costs
            logger.debug(
                "RBLN copies on %s take %.1f us each to the host, %.1f us inside the "
                "device; small pieces are collected in device memory where that pays",
                device,
                measurement.host_us,
                measurement.device_us,
            )
        return costs
    finally:
        measurement.running.release()


def _fixed_us(target: torch.Tensor, source: torch.Tensor, copies: int) -> float:
    """Return the time of one small copy among several, in microseconds."""
    stream = torch.rbln.current_stream(source.device)  # type: ignore[attr-defined]
    stream.synchronize()
    start = time.perf_counter()
    for _ in range(copies):
        target.copy_(source, non_blocking=True)
    stream.synchronize()
    return (time.perf_counter() - start) / copies * 1e6
