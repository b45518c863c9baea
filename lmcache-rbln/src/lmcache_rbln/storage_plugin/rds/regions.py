# SPDX-License-Identifier: Apache-2.0
"""The regions that a worker holds on the NVMe: made on demand, used again, bounded."""

# Standard
from collections.abc import Callable
import threading

# Local
from .device import RDSDevice, RDSError, RDSFullError, Region


class RDSLimitError(RDSFullError):
    """All space that this worker may take holds chunks that must stay."""


class RegionPool:
    """Regions of one size.

    Args:
        device: Makes and releases them.
        region_bytes: Size of each.
        limit: Most regions; 0: as many as the NVMe has space for.
    """

    def __init__(self, device: RDSDevice, region_bytes: int, limit: int) -> None:
        self._device = device
        self.region_bytes = region_bytes
        self.limit = limit
        self._free: list[Region] = []
        self._held = 0
        self._closed = False
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """NVMe space of all regions, used or not."""
        return self._held * self.region_bytes

    def acquire(self, evict: Callable[[], Region | None]) -> Region:
        """Take a region.

        Args:
            evict: Makes a used region free; ``None`` if all must stay.

        Raises:
            RDSLimitError: There is no space besides that of chunks which must stay.
            RDSFullError: There is no space, and this worker has none of it.
            RDSError: The storage failed.
        """
        full: RDSFullError | None = None
        with self._lock:
            if self._free:
                return self._free.pop()
            make = not self.limit or self._held < self.limit
            self._held += make
        if make:
            try:
                return self._device.new_region(self.region_bytes)
            except RDSError as error:
                with self._lock:
                    self._held -= 1
                if not isinstance(error, RDSFullError):
                    raise
                full = error
        region = evict()
        if region is not None:
            return region
        held = self._held
        if full is not None and not held:
            raise full
        raise RDSLimitError(
            f"all {held} chunks that "
            + ("fit on the NVMe" if full else "rds_max_chunks and rds_capacity allow")
            + " are promised to requests, in use, or worth more: the beginning of the "
            "same prompt, or a chunk behind one that is missing was to be stored"
        ) from full

    def give_back(self, region: Region) -> None:
        """Keep a region for the next chunk; one that is not sound is discarded."""
        with self._lock:
            if not self._closed and region.sound:
                self._free.append(region)
                return
        self.discard(region)

    def discard(self, region: Region) -> None:
        """Give a region's space back, after a failure or when the NVMe is full."""
        with self._lock:
            self._held -= 1
        self._device.release(region)

    def close(self) -> None:
        """Give all free regions back, and the others when they come."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
        for region in free:
            self.discard(region)
