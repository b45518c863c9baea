# SPDX-License-Identifier: Apache-2.0
"""Restores chunks, and forgets those that cannot be read or do not match."""

# Standard
from collections.abc import Callable
import time

# First Party
from lmcache.logging import init_logger
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj

# Local
from .rds_device import RDSError
from .rds_failures import Failures
from .rds_index import ChunkIndex, Entry
from .rds_metrics import RDSMetrics
from .rds_staging import StagingAllocator
from .rds_transfer import ChunkTransfer, Read
from .rds_waits import deadline_in

logger = init_logger(__name__)


class ChunkReader:
    """Restores chunks in the caller's thread.

    Args:
        allocator: Staging memory.
        index: Where the chunks are; forgets those that cannot be used.
        transfer: Reads and verifies them.
        metrics: Counts them.
        failures: Learns of those that could not be read.
        wait_timeout: Longest wait for staging memory, in seconds.
        changed: Called when chunks or staging memory have changed.
    """

    def __init__(
        self,
        allocator: StagingAllocator,
        index: ChunkIndex,
        transfer: ChunkTransfer,
        metrics: RDSMetrics,
        failures: Failures,
        wait_timeout: float,
        changed: Callable[[], None],
    ) -> None:
        self._allocator = allocator
        self._index = index
        self._transfer = transfer
        self._metrics = metrics
        self._failures = failures
        self._wait_timeout = wait_timeout
        self._changed = changed

    def load(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """Restore chunks into staging memory; never raises for the storage.

        Args:
            keys: Keys in the order of a prompt.

        Returns:
            For each a verified chunk with one reference, or ``None``.
        """
        entries = self._index.begin_reads(keys)
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
            self._metrics.add("read_failures", len(entries))
            self._failures.remember(error)
            return [None] * len(keys)
        finally:
            for entry in entries:
                self._index.end_read(entry)
        result: list[MemoryObj | None] = [None] * len(keys)
        for place, read in enumerate(reads):
            if read.error is None:
                result[place] = read.obj
            else:
                read.obj.ref_count_down()
        self._changed()
        return result

    def _take_memory(
        self, entries: list[Entry], wanted: int, reads: list[Read]
    ) -> None:
        """Take staging memory for as many chunks as there is in time."""
        left = deadline_in(self._wait_timeout)
        for entry in entries:
            obj = self._allocator.allocate_within(
                entry.shapes, entry.dtypes, entry.fmt, left
            )
            if obj is None:
                self._metrics.add("staging_failures")
                logger.warning(
                    "No RDS staging memory within %.1f s: %d of %d chunks restored; "
                    "raise rds_buffer_size",
                    self._wait_timeout,
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
        self._transfer.read(reads)
        self._metrics.observe("read_seconds", time.perf_counter() - started)
        good = [read for read in reads if read.error is None]
        self._metrics.add("read_chunks", len(good))
        self._metrics.add("read_bytes", sum(r.header.payload_bytes for r in good))

    def _drop_unreadable(self, key: CacheEngineKey, entry: Entry, read: Read) -> None:
        # It may be the place that is bad: the next chunk must not get it.
        entry.region.sound = False
        self._index.remove(key, only=entry)
        name = key.to_string()
        if read.damaged:
            self._metrics.add("rejected_chunks")
            logger.error("RDS chunk %s is damaged and dropped: %s", name, read.error)
        else:
            self._metrics.add("read_failures")
            logger.error("RDS read failed for %s: %s", name, read.error)
            self._failures.remember(
                RDSError(f"RDS read failed for {name}: {read.error}")
            )
