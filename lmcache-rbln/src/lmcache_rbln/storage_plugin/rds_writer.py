# SPDX-License-Identifier: Apache-2.0
"""Stores batches of chunks: finds them space, writes them, makes their keys visible."""

# Standard
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
import threading
import time

# First Party
from lmcache.logging import init_logger
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj

# Local
from .rds_device import RDSFullError, Region
from .rds_failures import Failures
from .rds_header import ChunkHeader, key_digest
from .rds_index import ChunkIndex, Entry
from .rds_metrics import RDSMetrics
from .rds_regions import RegionPool
from .rds_staging import StagedMemoryObj
from .rds_transfer import ChunkTransfer, Write

logger = init_logger(__name__)

#: Attempts of a batch that the NVMe has no space for.
_FULL_ATTEMPTS = 4

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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rds-writer")
        self._lock = threading.Lock()
        self._pending = 0
        self._closed = False

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
            keys: Their keys.
            objs: The chunks; each gets a reference of its own until it is written.
            on_complete: Called with each key that is down.

        Returns:
            The future of the batch; ``None`` if it is done, or there is nothing to do.
        """
        batch = self._claim(keys, objs)
        if not batch:
            return None
        if not self._overlapped:
            self._store(batch, on_complete)
            return None
        with self._lock:
            self._pending += 1
        try:
            return self._thread.submit(self._store_later, batch, on_complete)
        except RuntimeError:  # closed
            with self._lock:
                self._pending -= 1
            self._let_go(batch)
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
        batch: _Batch = []
        for key, obj in zip(keys, objs, strict=True):
            if not isinstance(obj, StagedMemoryObj):
                raise TypeError(
                    f"RDSBackend stores chunks in its own staging memory, got {obj!r}"
                )
            if self._index.claim(key):
                obj.ref_count_up()
                batch.append((key, obj))
        return batch

    def _let_go(self, batch: _Batch) -> None:
        for key, obj in batch:
            self._index.abandon(key)
            obj.ref_count_down()

    def _store_later(self, batch: _Batch, on_complete: OnComplete | None) -> None:
        try:
            self._store(batch, on_complete)
        finally:
            with self._lock:
                self._pending -= 1

    def _store(self, batch: _Batch, on_complete: OnComplete | None) -> None:
        """Write a batch and make its keys visible, or count its failure."""
        if self._closed:
            self._let_go(batch)
            return
        started = time.perf_counter()
        self._changed()
        regions, full = self._take_regions(len(batch))
        self._fail(batch[len(regions) :], full)
        batch = batch[: len(regions)]
        if not batch:
            return
        try:
            self._write(batch, regions)
        except Exception as error:  # anything but success is a failed write
            self._fail(batch, error)
            return
        self._metrics.observe("write_seconds", time.perf_counter() - started)
        self._metrics.add("written_chunks", len(batch))
        self._metrics.add("written_bytes", sum(o.payload_bytes for _, o in batch))
        for _, obj in batch:
            obj.ref_count_down()
        self._changed()
        for key, _ in batch:
            if on_complete is not None:
                try:
                    on_complete(key)
                except Exception as error:
                    logger.warning("The callback of %s failed: %s", key, error)

    def _fail(self, batch: _Batch, error: Exception | None) -> None:
        if not batch:
            return
        logger.error("RDS batched write failed for %d keys: %s", len(batch), error)
        self._metrics.add("write_failures", len(batch))
        self._failures.remember(error)
        self._let_go(batch)
        self._changed()

    def _take_regions(self, count: int) -> tuple[list[Region], Exception | None]:
        """Take up to ``count`` regions, and the error that kept it from more."""
        regions: list[Region] = []
        try:
            while len(regions) < count:
                regions.append(self._regions.acquire(self._evict))
        except Exception as error:
            return regions, error
        return regions, None

    def _write(self, batch: _Batch, regions: list[Region]) -> None:
        writes = [
            Write(obj, region, key_digest(key.to_string()))
            for (key, obj), region in zip(batch, regions, strict=True)
        ]
        try:
            headers = self._write_evicting(writes)
        except BaseException:
            for region in regions:
                # What it holds now is not known: the space goes back, not the region.
                self._regions.discard(region)
            raise
        for (key, obj), region, header in zip(batch, regions, headers, strict=True):
            entry = Entry(
                region,
                header,
                list(obj.get_shapes()),
                list(obj.get_dtypes()),
                obj.meta.fmt,
            )
            self._index.publish(key, entry)

    def _write_evicting(self, writes: list[Write]) -> list[ChunkHeader]:
        """Write; if the NVMe is full, evict as much as was to be written, and again."""
        attempts_left = _FULL_ATTEMPTS
        while True:
            try:
                return self._transfer.write(writes)
            except RDSFullError:
                attempts_left -= 1
                if not attempts_left:
                    # Eviction makes no space: what is stored is worth more than this.
                    raise
                victims = [self._index.evict() for _ in writes]
                freed = [victim for victim in victims if victim is not None]
                if not freed:
                    raise
                self._metrics.add("evicted_chunks", len(freed))
                for victim in freed:
                    self._regions.discard(victim.region)

    def _evict(self) -> Region | None:
        victim = self._index.evict()
        if victim is None:
            return None
        self._metrics.add("evicted_chunks")
        return victim.region
