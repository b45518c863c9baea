# SPDX-License-Identifier: Apache-2.0
"""Stores chunks: in batches, with others evicted for their space."""

# Standard
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any
import time

# First Party
from lmcache.logging import init_logger
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj

# Local
from .device import RDSDevice, RDSFullError, Region
from .header import key_digest
from .index import Entry
from .regions import RDSLimitError
from .restore import ChunkRestores
from .settings import RDSSettings
from .staging import StagedMemoryObj, StagingAllocator
from .threads import DaemonThreads

logger = init_logger(__name__)

#: Times that a batch makes space on a full NVMe by eviction.
_MOST_EVICTIONS = 3

OnComplete = Callable[[CacheEngineKey], None]
_Batch = list[tuple[CacheEngineKey, StagedMemoryObj]]


class ChunkStore(ChunkRestores):
    """The chunks of one worker; any number of threads may call.

    Args:
        device: The storage.
        allocator: Staging memory.
        metrics: Count what happens, by name.
        settings: The user's.
        overlapped: Whether to write in a thread of its own.

    Raises:
        ValueError: ``rds_capacity`` holds no chunk.
    """

    def __init__(
        self,
        device: RDSDevice,
        allocator: StagingAllocator,
        metrics: dict[str, Any],
        settings: RDSSettings,
        overlapped: bool,
    ) -> None:
        super().__init__(device, allocator, metrics, settings)
        # One: batches are written in the order in which they were stored.
        self._writer = DaemonThreads(1, "rds-writer") if overlapped else None
        self._pending = 0
        self._closed = False
        self._told_limit = False

    @property
    def busy(self) -> bool:
        """Whether batches are being written, whose staging memory will come back."""
        return self._pending > 0

    # ---- store ----------------------------------------------------------------------

    def put(
        self,
        keys: Sequence[CacheEngineKey],
        objs: Sequence[MemoryObj],
        on_complete: OnComplete | None,
    ) -> Future[None] | None:
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
        staged = []
        for obj in objs:
            if not isinstance(obj, StagedMemoryObj):
                raise TypeError(
                    f"RDSBackend stores chunks in its own staging memory, got {obj!r}"
                )
            staged.append(obj)
        pairs = list(zip(keys, staged, strict=True))
        claimed = self.index.claim(keys)
        try:
            batch = [pair for pair, new in zip(pairs, claimed, strict=True) if new]
            if not batch:
                return None
            for _, obj in batch:
                obj.ref_count_up()
            with self._lock:
                self._pending += 1
        except BaseException:
            # An interrupt: nobody else would let the claims go.
            for key, new in zip(keys, claimed, strict=True):
                if new:
                    self.index.abandon(key)
            raise
        if self._writer is not None:
            try:
                return self._writer.submit(self._put, batch, on_complete)
            except RuntimeError:  # closed: below, it only lets the batch go
                pass
        self._put(batch, on_complete)
        return None

    def _put(self, batch: _Batch, on_complete: OnComplete | None) -> None:
        """Write a batch, and let go of it: claims and references, once each."""
        written = 0
        try:
            if not self._closed:
                self.show_state()
                written = self._write(batch)
        except Exception as error:  # never into the engine, or unseen into a future
            self._tell_failure(len(batch), error)
        finally:
            for key, _ in batch[written:]:
                self.index.abandon(key)
            with self._lock:
                self._pending -= 1
                self._changed.notify_all()
            # Who waits for staging memory is woken by this, and sees who is busy.
            for _, obj in batch:
                obj.ref_count_down()
        self.show_state()
        for key, _ in batch[:written]:
            if on_complete is not None:
                try:
                    on_complete(key)
                except Exception as error:
                    logger.warning("The callback of %s failed: %s", key, error)

    def _write(self, batch: _Batch) -> int:
        """Write as much of a batch as there is space for, and tell of the rest.

        Returns:
            How many chunks, from the first one on, are visible.
        """
        started = time.perf_counter()
        regions: list[Region] = []
        no_space: Exception | None = None
        evictions = _MOST_EVICTIONS
        try:
            try:
                for key, _ in batch:
                    regions.append(self._regions.acquire(partial(self._evict, key)))
            except Exception as error:  # whatever it is, what was taken is used
                no_space = error
            while regions:
                part = batch[: len(regions)]
                try:
                    self._publish(part, regions)
                    break
                except RDSFullError as error:
                    no_space = error
                if evictions and self._evict_for(part):
                    evictions -= 1
                else:
                    # The space of its last chunk may be what the others lack. Where
                    # eviction made none, what is stored is worth more than this batch.
                    self._regions.discard(regions.pop())
        except BaseException as error:
            for region in regions:
                # What it holds now is not known: the space goes back, not the region.
                self._regions.discard(region)
            if not isinstance(error, Exception):
                raise
            self._tell_failure(len(regions), error)
            written, rest = 0, len(batch) - len(regions)
        else:
            written, rest = len(regions), len(batch) - len(regions)
        if written:
            nbytes = sum(obj.payload_bytes for _, obj in batch[:written])
            self._metrics["write_seconds"].observe(time.perf_counter() - started)
            self._metrics["written_chunks"].inc(written)
            self._metrics["written_bytes"].inc(nbytes)
        if rest and no_space is not None:
            # Full of what must stay, the beginning of this batch at least: no failure.
            full = isinstance(no_space, RDSFullError) and evictions and self.index
            if full or isinstance(no_space, RDSLimitError):
                self._tell_limit(rest, no_space)
            else:
                self._tell_failure(rest, no_space)
        return written

    def _publish(self, batch: _Batch, regions: list[Region]) -> None:
        """Write chunks into regions and make their keys visible; all, or none."""
        headers = self.io.write(
            [
                (key_digest(key.to_string()), obj, region)
                for (key, obj), region in zip(batch, regions, strict=True)
            ]
        )
        stored = []
        for (key, obj), region, header in zip(batch, regions, headers, strict=True):
            shapes, dtypes = list(obj.get_shapes()), list(obj.get_dtypes())
            stored.append((key, Entry(region, header, shapes, dtypes, obj.meta.fmt)))
        self.index.publish(stored)

    def _evict(self, room_for: CacheEngineKey) -> Region | None:
        victim = self.index.evict(room_for)
        if victim is None:
            return None
        self._metrics["evicted_chunks"].inc()
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
        self._failed("write_failures", count, error)

    def _tell_limit(self, count: int, reason: Exception) -> None:
        self._metrics["unplaced_chunks"].inc(count)
        if not self._told_limit:
            self._told_limit = True
            logger.warning(
                "RDS has no space for %d chunks, which are not stored: %s. Raise "
                "rds_max_chunks or rds_capacity for longer prompts (not said again; "
                "lmcache:rds_unplaced_chunks_total counts them)",
                count,
                reason,
            )

    # ---- end ------------------------------------------------------------------------

    def close(self, seconds: float) -> None:
        """Drop what has not begun to be written, and wait for what has.

        Args:
            seconds: Longest wait.
        """
        self._closed = True
        if self._writer is not None:
            self._writer.close(cancel=False)
        with self._lock:
            ended = self._changed.wait_for(lambda: not self.busy, seconds)
        if not ended:
            logger.error(
                "An RDS write has not ended within %.0f s; going on without it",
                seconds,
            )
        self.index.close()
        self._regions.close()
