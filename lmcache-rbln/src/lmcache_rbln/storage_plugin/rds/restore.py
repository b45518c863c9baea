# SPDX-License-Identifier: Apache-2.0
"""Restores chunks, and forgets those that are unreadable or not what was written."""

# Standard
from typing import Any
import threading
import time

# First Party
from lmcache.logging import init_logger
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj

# Local
from .chunk_io import ChunkIO, Read
from .device import RDSDevice, RDSError
from .header import HEADER_BYTES
from .index import ChunkIndex, Entry
from .regions import RegionPool
from .settings import RDSSettings
from .staging import StagingAllocator

logger = init_logger(__name__)


class ChunkRestores:
    """What ``ChunkStore`` does with chunks that are stored; see there.

    Attributes:
        io: Moves the bytes.
        index: Which chunk is where.
        limit: Most chunks; 0: as many as fit.
    """

    def __init__(
        self,
        device: RDSDevice,
        allocator: StagingAllocator,
        metrics: dict[str, Any],
        settings: RDSSettings,
    ) -> None:
        nbytes = HEADER_BYTES + allocator.slot_bytes
        self.limit = _most_regions(settings, nbytes)
        self._regions = RegionPool(device, nbytes, self.limit)
        self.index = ChunkIndex(self._regions.give_back)
        self.io = ChunkIO(device, settings.checksum)
        self._allocator = allocator
        self._metrics = metrics
        self._settings = settings
        # Entered by itself: between the calls of a condition an interrupt leaks it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # The first one that ``rds_failure_policy: raise`` has to raise.
        self._failure: Exception | None = None

    def raise_pending(self) -> None:
        """Raise the first failure since the last call, under the policy ``raise``.

        Raises:
            RDSError: There was one.
        """
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise RDSError(f"rds_failure_policy is raise: {failure}") from failure

    def _failed(self, counter: str, count: int, error: Exception) -> None:
        """Count chunks that failed, and remember why if that is to be raised."""
        self._metrics[counter].inc(count)
        if self._settings.failure_policy == "raise":
            with self._lock:
                self._failure = self._failure or error

    def show_state(self) -> None:
        """Set the gauges; called when chunks, space or staging memory have changed."""
        self._metrics["chunks"].set(len(self.index))
        self._metrics["used_bytes"].set(self._regions.held_bytes)
        free = self._allocator.free_slots * self._allocator.slot_bytes
        self._metrics["staging_free_bytes"].set(free)

    def load(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """Restore chunks into staging memory; never raises for the storage.

        Chunks that cannot be read, or are not what was written, are forgotten.

        Args:
            keys: Keys in the order of a prompt.

        Returns:
            For each a verified chunk with one reference, or ``None``.
        """
        entries = self.index.begin_reads(keys)
        reads: list[Read] = []
        try:
            self._take_memory(entries, len(keys), reads)
            if reads:
                self._read(reads)
            # Before the reads end, so that no region is used again first.
            for key, entry, read in zip(keys, entries, reads, strict=False):
                if read.error is not None:
                    self._drop_unreadable(key, entry, read)
        except BaseException as error:
            for read in reads:
                read.obj.ref_count_down()
            if not isinstance(error, Exception):
                raise
            # Whatever it is, the engine computes the tokens instead.
            logger.exception("RDS restore of %d chunks failed", len(keys))
            self._failed("read_failures", len(entries), error)
            return [None] * len(keys)
        finally:
            for entry in entries:
                self.index.end_read(entry)
        result: list[MemoryObj | None] = [None] * len(keys)
        for place, read in enumerate(reads):
            if read.error is None:
                result[place] = read.obj
            else:
                read.obj.ref_count_down()
        self.show_state()
        return result

    def _take_memory(
        self, entries: list[Entry], wanted: int, reads: list[Read]
    ) -> None:
        """Take staging memory for as many chunks as there is in time."""
        end = time.monotonic() + self._settings.wait_timeout
        for entry in entries:
            obj = self._allocator.allocate_within(
                entry.shapes, entry.dtypes, entry.fmt, lambda: end - time.monotonic()
            )
            if obj is None:
                self._metrics["staging_failures"].inc()
                logger.warning(
                    "No RDS staging memory within %.1f s: %d of %d chunks restored; "
                    "raise rds_buffer_size",
                    self._settings.wait_timeout,
                    len(reads),
                    wanted,
                )
                return
            obj.layout = entry.header.layout
            obj.block_size = entry.header.block_size
            obj.payload_bytes = entry.header.payload_bytes
            reads.append(Read(obj, entry.region, entry.header))

    def _read(self, reads: list[Read]) -> None:
        started = time.perf_counter()
        self.io.read(reads)
        self._metrics["read_seconds"].observe(time.perf_counter() - started)
        good = [read for read in reads if read.error is None]
        self._metrics["read_chunks"].inc(len(good))
        self._metrics["read_bytes"].inc(sum(r.header.payload_bytes for r in good))

    def _drop_unreadable(self, key: CacheEngineKey, entry: Entry, read: Read) -> None:
        # It may be the place that is bad: the next chunk must not get it.
        entry.region.sound = False
        self.index.remove(key, only=entry)
        name = key.to_string()
        if read.damaged:
            self._metrics["rejected_chunks"].inc()
            logger.error("RDS chunk %s is damaged and dropped: %s", name, read.error)
        else:
            error = RDSError(f"RDS read failed for {name}: {read.error}")
            logger.error("%s", error)
            self._failed("read_failures", 1, error)


def _most_regions(settings: RDSSettings, nbytes: int) -> int:
    """Most regions of a size that the settings allow; 0: no limit."""
    limits = [settings.max_chunks] if settings.max_chunks else []
    if settings.capacity:
        limits.append(settings.capacity_bytes // nbytes)
        if not limits[-1]:
            raise ValueError(
                f"rds_capacity of {settings.capacity} MiB holds no chunk of {nbytes} "
                "bytes; raise it, or leave it out for no limit"
            )
    return min(limits, default=0)
