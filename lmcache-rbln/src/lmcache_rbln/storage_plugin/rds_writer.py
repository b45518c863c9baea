# SPDX-License-Identifier: Apache-2.0
"""Stores batches of chunks: finds them space, writes them, makes their keys visible."""

# Standard
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
import threading
import time

# First Party
from lmcache.logging import init_logger
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj

# Local
from .rds_device import RDSFullError, Region
from .rds_failures import Failures
from .rds_header import key_digest
from .rds_index import ChunkIndex, Entry
from .rds_metrics import RDSMetrics
from .rds_regions import RDSLimitError, RegionPool
from .rds_staging import StagedMemoryObj
from .rds_threads import DaemonThreads
from .rds_transfer import ChunkTransfer, Write

logger = init_logger(__name__)

#: Times that a batch makes space on a full NVMe by eviction.
_MOST_EVICTIONS = 3

OnComplete = Callable[[CacheEngineKey], None]
_Batch = list[tuple[CacheEngineKey, StagedMemoryObj]]


class ChunkWriter:
    """Writes batches, in the caller's thread or in one of its own.

    Args:
        index: Learns of the chunks that are down.
        regions: Space for them.
        transfer: Writes them.
        metrics: Counts them.
        failures: Learns of those that failed.
        overlapped: Whether to write in the own thread.
        changed: Called when chunks, space or staging memory have changed.
    """

    def __init__(
        self,
        index: ChunkIndex,
        regions: RegionPool,
        transfer: ChunkTransfer,
        metrics: RDSMetrics,
        failures: Failures,
        overlapped: bool,
        changed: Callable[[], None],
    ) -> None:
        self._index = index
        self._regions = regions
        self._transfer = transfer
        self._metrics = metrics
        self._failures = failures
        self._overlapped = overlapped
        self._changed = changed
        # One: batches are written in the order in which they were stored.
        self._thread = DaemonThreads(1, "rds-writer")
        self._lock = threading.Lock()
        self._pending = 0
        self._closed = False
        self._told_limit = False

    @property
    def busy(self) -> bool:
        """Whether batches are being written, whose staging memory will come back."""
        return self._pending > 0

    def submit(
        self,
        keys: Sequence[CacheEngineKey],
        objs: Sequence[MemoryObj],
        on_complete: OnComplete | None,
    ) -> Future | None:
        """Write chunks; those that are stored or being written already are left out.

        Args:
            keys: Their keys, in the order of a prompt.
            objs: The chunks; each gets a reference of its own until it is written.
            on_complete: Called with each key that is down.

        Returns:
            The future of the batch; ``None`` if it is done, or there is nothing to do.

        Raises:
            TypeError: A chunk is not in staging memory; nothing is written.
        """
        batch = self._claim(keys, objs)
        if not batch:
            return None
        with self._lock:
            self._pending += 1
        if self._overlapped:
            try:
                return self._thread.submit(self._store, batch, on_complete)
            except RuntimeError:  # closed: below, it only lets the batch go
                pass
        self._store(batch, on_complete)
        return None

    def close(self, timeout: float) -> None:
        """Drop what has not begun, and wait for what has.

        Args:
            timeout: Longest wait in seconds.
        """
        self._closed = True
        self._thread.shutdown(wait=False)
        deadline = time.monotonic() + timeout
        while self.busy and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.busy:
            logger.error(
                "An RDS write has not ended within %.0f s; going on without it",
                timeout,
            )

    def _claim(
        self, keys: Sequence[CacheEngineKey], objs: Sequence[MemoryObj]
    ) -> _Batch:
        staged = []
        for obj in objs:
            if not isinstance(obj, StagedMemoryObj):
                raise TypeError(
                    f"RDSBackend stores chunks in its own staging memory, got {obj!r}"
                )
            staged.append(obj)
        pairs = list(zip(keys, staged, strict=True))
        batch = [
            pair
            for pair, new in zip(pairs, self._index.claim(keys), strict=True)
            if new
        ]
        for _, obj in batch:
            obj.ref_count_up()
        return batch

    def _store(self, batch: _Batch, on_complete: OnComplete | None) -> None:
        """Write a batch, and let go of it: claims and references, once each."""
        written: list[CacheEngineKey] = []
        try:
            if not self._closed:
                self._changed()
                self._write(batch, written)
        except Exception as error:  # never into the engine, or unseen into a future
            lost = [pair for pair in batch if pair[0] not in written]
            self._tell_failure(len(lost), error)
        finally:
            for key, obj in batch:
                if key not in written:
                    self._index.abandon(key)
                obj.ref_count_down()
            with self._lock:
                self._pending -= 1
        self._changed()
        for key in written:
            if on_complete is not None:
                try:
                    on_complete(key)
                except Exception as error:
                    logger.warning("The callback of %s failed: %s", key, error)

    def _write(self, batch: _Batch, written: list[CacheEngineKey]) -> None:
        """Write as much of a batch as there is space for: its beginning.

        Args:
            batch: The chunks.
            written: Gets the keys that are visible.
        """
        started = time.perf_counter()
        regions, no_space = self._take_regions(batch)
        rest = batch[len(regions) :]
        batch = batch[: len(regions)]
        evictions = _MOST_EVICTIONS
        try:
            while batch:
                try:
                    self._publish(batch, regions)
                    break
                except RDSFullError as error:
                    no_space = error
                if evictions and self._evict_for(batch):
                    evictions -= 1
                    continue
                # The space of its last chunk may be what the others lack. Where
                # eviction made none, what is stored is worth more than this batch.
                rest.insert(0, batch.pop())
                self._regions.discard(regions.pop())
        except BaseException as error:
            for region in regions:
                # What it holds now is not known: the space goes back, not the region.
                self._regions.discard(region)
            if not isinstance(error, Exception):
                raise
            self._tell_failure(len(batch), error)
            batch = []
        written += [key for key, _ in batch]
        if batch:
            self._metrics.observe("write_seconds", time.perf_counter() - started)
            self._metrics.add("written_chunks", len(batch))
            self._metrics.add("written_bytes", sum(o.payload_bytes for _, o in batch))
        if not rest or no_space is None:
            return
        # Full of what must stay, the beginning of this batch at least: no failure.
        full = isinstance(no_space, RDSFullError) and evictions and len(self._index)
        if full or isinstance(no_space, RDSLimitError):
            self._tell_limit(len(rest), no_space)
        else:
            self._tell_failure(len(rest), no_space)

    def _publish(self, batch: _Batch, regions: list[Region]) -> None:
        """Write chunks into regions and make their keys visible; all, or none."""
        headers = self._transfer.write(
            [
                Write(obj, region, key_digest(key.to_string()))
                for (key, obj), region in zip(batch, regions, strict=True)
            ]
        )
        stored = []
        for (key, obj), region, header in zip(batch, regions, headers, strict=True):
            shapes, dtypes = list(obj.get_shapes()), list(obj.get_dtypes())
            stored.append((key, Entry(region, header, shapes, dtypes, obj.meta.fmt)))
        self._index.publish(stored)

    def _take_regions(self, batch: _Batch) -> tuple[list[Region], Exception | None]:
        """Take regions for the first chunks, and the error that kept it from more."""
        regions: list[Region] = []
        try:
            for key, _ in batch:
                regions.append(self._regions.acquire(partial(self._evict, key)))
        except Exception as error:  # whatever it is, what was taken is used
            return regions, error
        return regions, None

    def _evict(self, room_for: CacheEngineKey) -> Region | None:
        victim = self._index.evict(room_for)
        if victim is None:
            return None
        self._metrics.add("evicted_chunks")
        return victim.region

    def _evict_for(self, batch: _Batch) -> bool:
        """Give back as much space as a batch needs; False if all must stay."""
        last = batch[-1][0]
        freed = [region for _ in batch if (region := self._evict(last)) is not None]
        for region in freed:
            self._regions.discard(region)
        return bool(freed)

    def _tell_failure(self, count: int, error: Exception) -> None:
        logger.error("RDS batched write failed for %d keys: %s", count, error)
        self._metrics.add("write_failures", count)
        self._failures.remember(error)

    def _tell_limit(self, count: int, reason: Exception) -> None:
        self._metrics.add("unplaced_chunks", count)
        if not self._told_limit:
            self._told_limit = True
            logger.warning(
                "RDS has no space for %d chunks, which are not stored: %s. Raise "
                "rds_max_chunks or rds_capacity for longer prompts (not said again; "
                "lmcache:rds_unplaced_chunks_total counts them)",
                count,
                reason,
            )
