# SPDX-License-Identifier: Apache-2.0
"""``RDSBackend``: LMCache's storage plugin for chunks on NVMe, next to the NPU."""

# Standard
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast
import asyncio
import itertools
import threading
import time

# Third Party
import torch

# First Party
from lmcache.logging import init_logger
from lmcache.utils import CacheEngineKey, get_size_bytes
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import (
    MemoryAllocatorInterface,
    MemoryFormat,
    MemoryObj,
)
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.abstract_backend import AllocatorBackendInterface

# Local
from . import allocator_choice
from .rds_device import RDSDevice, RDSError, RDSFullError, Region
from .rds_header import ChunkHeader, key_digest
from .rds_index import ChunkIndex, Entry
from .rds_metrics import RDSMetrics
from .rds_regions import RegionPool
from .rds_settings import RDSSettings, read_settings
from .rds_staging import StagedMemoryObj, StagingAllocator, deadline_in
from .rds_transfer import ChunkTransfer, Read, Write, region_bytes

logger = init_logger(__name__)

# This module is imported when LMCache loads the plugin, before it chooses an allocator.
allocator_choice.install()

OnComplete = Callable[[CacheEngineKey], None]
_Batch = list[tuple[CacheEngineKey, StagedMemoryObj]]
#: Longest wait for the batch that is being written when the backend is closed.
_CLOSE_TIMEOUT_S = 9.0


class RDSBackend(AllocatorBackendInterface):
    """Keeps KV chunks on the NVMe of Rebellions Direct Storage.

    Chunks go from the NPU to the NVMe and back without passing through host memory.
    The index is in memory: a restarted worker begins with nothing. Any number of
    threads may call.

    Args:
        config: LMCache's configuration; ``rds_*`` in its extra config is for this.
        metadata: LMCache's metadata of the model and the worker.
        local_cpu_backend: LMCache's CPU tier, which must be off.
        loop: LMCache's event loop; nothing here blocks it.
        dst_device: The worker's NPU.

    Raises:
        ValueError: A setting cannot be used.
        RDSError: There is no direct storage, or not enough NPU memory.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        local_cpu_backend: Any = None,
        loop: asyncio.AbstractEventLoop | None = None,
        dst_device: str = "rbln:0",
    ) -> None:
        super().__init__(dst_device=dst_device)
        self.settings = read_settings(config.extra_config)
        _require_usable(config, metadata, local_cpu_backend, torch.device(dst_device))
        self.config = config
        self.metadata = metadata
        self.loop = loop
        self._device = RDSDevice(torch.device(dst_device), self.settings.numa_node)
        self._metrics = RDSMetrics(config, metadata)
        self._allocator = self.initialize_allocator(config, metadata)
        nbytes = region_bytes(self._allocator.slot_bytes)
        self._regions = RegionPool(
            self._device, nbytes, _most_regions(self.settings, nbytes)
        )
        self._index = ChunkIndex(self._regions.give_back)
        self._transfer = ChunkTransfer(self._device, self.settings.checksum)
        self._overlapped = self.settings.overlaps(metadata.world_size)
        # One thread: batches are written in the order in which they were stored.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rds-writer")
        self._reader = ThreadPoolExecutor(2, thread_name_prefix="rds-reader")
        self._pending_writes = 0
        self._lock = threading.Lock()
        self._failure: RDSError | None = None
        self._closed = False
        self._cut_lookups = False
        if self.settings.checksum == "header":
            logger.warning(
                "rds_checksum=header: bit errors in a chunk's payload are not found"
            )
        logger.info(
            "RDSBackend on %s: %d staging slots of %d bytes, %s writes, at most %s "
            "chunks, failure policy %s",
            dst_device,
            self._allocator.num_slots,
            self._allocator.slot_bytes,
            "overlapped" if self._overlapped else "synchronous",
            _most_regions(self.settings, nbytes) or "as many as fit",
            self.settings.failure_policy,
        )
        self._show_state()

    def __str__(self) -> str:
        return self.__class__.__name__

    # ---- memory ---------------------------------------------------------------------

    def initialize_allocator(
        self, config: LMCacheEngineConfig, metadata: LMCacheMetadata
    ) -> StagingAllocator:
        """Make the device staging memory for full chunks of the model."""
        chunk_bytes = get_size_bytes(metadata.get_shapes(), metadata.get_dtypes())
        return StagingAllocator(self._device, self.settings.buffer_bytes, chunk_bytes)

    def get_memory_allocator(self) -> MemoryAllocatorInterface:
        """Return the device staging memory."""
        return self._allocator

    def get_allocator_backend(self) -> "RDSBackend":
        """Return this backend: it allocates for itself."""
        return self

    def allocate(
        self,
        shapes: torch.Size | list[torch.Size],
        dtypes: torch.dtype | list[torch.dtype],
        fmt: MemoryFormat | None = MemoryFormat.KV_2LTD,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> MemoryObj | None:
        """Take staging memory for a chunk.

        While writes are under way their memory comes back, so it is waited for, at most
        ``rds_wait_timeout``.

        Args:
            shapes: Of the tensors in the chunk.
            dtypes: Of the tensors in the chunk.
            fmt: LMCache's format; ``None`` means KV_2LTD.
            eviction: Not used: what is stored holds no staging memory.
            busy_loop: Not used: the wait is bounded in any case.

        Returns:
            The object with one reference, or ``None``: nothing more is to be stored.
        """
        left = deadline_in(self.settings.wait_timeout)
        obj = self._allocator.allocate_within(
            shapes, dtypes, fmt, lambda: left() if self._pending_writes else 0.0
        )
        if obj is None:
            self._metrics.add("staging_failures")
        self._show_state()
        return obj

    def batched_allocate(
        self,
        shapes: torch.Size | list[torch.Size],
        dtypes: torch.dtype | list[torch.dtype],
        batch_size: int,
        fmt: MemoryFormat | None = MemoryFormat.KV_2LTD,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> list[MemoryObj] | None:
        """Take staging memory for several chunks, or ``None``."""
        objs: list[MemoryObj] = []
        for _ in range(batch_size):
            obj = self.allocate(shapes, dtypes, fmt, eviction, busy_loop)
            if obj is None:
                self._allocator.batched_free(objs)
                return None
            objs.append(obj)
        return objs

    def calculate_chunk_budget(self) -> int:
        """Return how many chunks the staging memory holds."""
        return self._allocator.num_slots

    # ---- store ----------------------------------------------------------------------

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """Tell whether a key is being written."""
        return self._index.is_writing(key)

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: OnComplete | None = None,
    ) -> list[Future] | None:
        """Write chunks; those that are stored or being written already are left out.

        Args:
            keys: Their keys.
            objs: The chunks; each gets a reference of its own until it is written.
            transfer_spec: Not used.
            on_complete_callback: Called with each key that is down.

        Returns:
            The future of the batch, or ``None`` if there is nothing to do or writes are
            synchronous.

        Raises:
            RDSError: Under ``rds_failure_policy: raise``, if this write failed, or an
                overlapped one before it.
        """
        started = time.perf_counter()
        self._surface_failure()
        batch = self._claim(keys, objs)
        if not batch:
            return None
        if not self._overlapped:
            self._store(batch, on_complete_callback)
            self._surface_failure()
            return None
        with self._lock:
            self._pending_writes += 1
        try:
            future = self._writer.submit(self._store_later, batch, on_complete_callback)
        except RuntimeError:  # the executor is shut down
            with self._lock:
                self._pending_writes -= 1
            self._let_go(batch)
            return None
        self._metrics.observe("submit_seconds", time.perf_counter() - started)
        return [future]

    async def async_batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: OnComplete | None = None,
    ) -> None:
        """Write chunks from the event loop without blocking it."""
        await asyncio.get_running_loop().run_in_executor(
            self._reader,
            lambda: self.batched_submit_put_task(
                keys, objs, transfer_spec, on_complete_callback
            ),
        )

    def _claim(self, keys: Sequence[CacheEngineKey], objs: list[MemoryObj]) -> _Batch:
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
                self._pending_writes -= 1

    def _store(self, batch: _Batch, on_complete: OnComplete | None) -> None:
        """Write a batch and make its keys visible, or count its failure."""
        if self._closed:
            self._let_go(batch)
            return
        started = time.perf_counter()
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
        for key, obj in batch:
            obj.ref_count_down()
            if on_complete is not None:
                try:
                    on_complete(key)
                except Exception as error:
                    logger.warning("The callback of %s failed: %s", key, error)
        self._show_state()

    def _fail(self, batch: _Batch, error: Exception | None) -> None:
        if not batch:
            return
        logger.error("RDS batched write failed for %d keys: %s", len(batch), error)
        self._metrics.add("write_failures", len(batch))
        self._remember(error)
        self._let_go(batch)
        self._show_state()

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
        """Write; while the NVMe is full, evict as much as was to be written."""
        while True:
            try:
                return self._transfer.write(writes)
            except RDSFullError:
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

    # ---- lookup ---------------------------------------------------------------------

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Tell whether a key is stored; ``pin`` keeps it from eviction."""
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """Count how many keys in a row are stored.

        Not more than staging memory has slots: LMCache restores them all at once.

        Args:
            keys: Keys in the order of a prompt.
            pin: Whether to keep the counted ones from eviction.
        """
        limit = self._allocator.num_slots
        found = self._index.count_prefix(keys, pin, limit)
        if found == limit < len(keys) and not self._cut_lookups:
            self._cut_lookups = True
            logger.warning(
                "A prompt of %d chunks is restored up to chunk %d, which is what "
                "rds_buffer_size holds; raise it to restore longer prompts",
                len(keys),
                limit,
            )
        self._metrics.add("lookup_hits", found)
        self._metrics.add("lookup_misses", len(keys) - found)
        return found

    async def batched_async_contains(
        self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False
    ) -> int:
        """Count how many keys in a row are stored; in memory, so it never blocks."""
        return self.batched_contains(keys, pin)

    def pin(self, key: CacheEngineKey) -> bool:
        """Keep a key from eviction."""
        return self._index.pin(key)

    def unpin(self, key: CacheEngineKey) -> bool:
        """Allow a key's eviction again."""
        return self._index.unpin(key)

    def touch_cache(self) -> None:
        """Do nothing: lookups order the keys themselves."""

    # ---- restore --------------------------------------------------------------------

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """Restore a chunk; see :meth:`batched_get_blocking`."""
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(
        self, keys: list[CacheEngineKey]
    ) -> list[MemoryObj | None]:
        """Restore chunks into staging memory.

        Args:
            keys: Keys in the order of a prompt.

        Returns:
            For each a verified chunk with one reference, or ``None``: it is not stored,
            could not be read, is not what was written, or there was no staging memory
            in time.

        Raises:
            RDSError: Under ``rds_failure_policy: raise``, if the storage failed now or
                in an overlapped write before.
        """
        self._surface_failure()
        objs = self._load(keys)
        try:
            self._surface_failure()
        except RDSError:
            for obj in objs:
                if obj is not None:
                    obj.ref_count_down()
            raise
        return objs

    def get_non_blocking(
        self, key: CacheEngineKey, location: str | None = None
    ) -> Future | None:
        """Restore a chunk in the background; ``None`` if it is not stored."""
        if not self.contains(key):
            return None
        return self._reader.submit(lambda: self._load([key])[0])

    async def batched_get_non_blocking(
        self,
        lookup_id: str,
        keys: list[CacheEngineKey],
        transfer_spec: Any = None,
    ) -> list[MemoryObj]:
        """Restore chunks from the event loop without blocking it.

        Never raises, since LMCache's lookup would wait for ever; a failure surfaces in
        the next blocking call.

        Returns:
            The chunks before the first that could not be restored.
        """
        loop = asyncio.get_running_loop()
        objs = await loop.run_in_executor(self._reader, self._load, keys)
        prefix = list(itertools.takewhile(lambda obj: obj is not None, objs))
        for obj in objs[len(prefix) :]:
            if obj is not None:
                obj.ref_count_down()
        return cast("list[MemoryObj]", prefix)

    def _load(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        taken: list[tuple[CacheEngineKey, Entry, Read]] = []
        left = deadline_in(self.settings.wait_timeout)
        for key in keys:
            entry = self._index.begin_read(key)
            if entry is None:
                break  # LMCache uses nothing behind the first that is missing
            obj = self._allocator.allocate_within(
                entry.shapes, entry.dtypes, entry.fmt, left
            )
            if obj is None:
                self._index.end_read(entry)
                self._metrics.add("staging_failures")
                logger.warning(
                    "No RDS staging memory within %.1f s: %d of %d chunks restored; "
                    "raise rds_buffer_size",
                    self.settings.wait_timeout,
                    len(taken),
                    len(keys),
                )
                break
            obj.layout = entry.header.layout
            obj.block_size = entry.header.block_size
            obj.payload_bytes = entry.header.payload_bytes
            taken.append((key, entry, Read(obj, entry.region, entry.header)))
        if taken:
            self._read(taken)
        result: list[MemoryObj | None] = [None] * len(keys)
        for place, (_, _, read) in enumerate(taken):
            if read.error is None:
                result[place] = read.obj
            else:
                read.obj.ref_count_down()
        self._show_state()
        return result

    def _read(self, taken: list[tuple[CacheEngineKey, Entry, Read]]) -> None:
        started = time.perf_counter()
        reads = [read for _, _, read in taken]
        try:
            self._transfer.read(reads)
        finally:
            for key, entry, read in taken:
                if read.error is not None:
                    # Before the read ends, so that its region is not used again first.
                    self._drop_unreadable(key, entry, read)
                self._index.end_read(entry)
        self._metrics.observe("read_seconds", time.perf_counter() - started)
        good = [read for read in reads if read.error is None]
        self._metrics.add("read_chunks", len(good))
        self._metrics.add("read_bytes", sum(r.header.payload_bytes for r in good))

    def _drop_unreadable(self, key: CacheEngineKey, entry: Entry, read: Read) -> None:
        self._index.remove(key, only=entry)
        name = key.to_string()
        if read.damaged:
            self._metrics.add("rejected_chunks")
            logger.error("RDS chunk %s is damaged and dropped: %s", name, read.error)
        else:
            self._metrics.add("read_failures")
            logger.error("RDS read failed for %s: %s", name, read.error)
            self._remember(RDSError(f"RDS read failed for {name}: {read.error}"))

    # ---- removal, end ---------------------------------------------------------------

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Forget a key; a pinned one only with ``force``."""
        removed = self._index.remove(key, force)
        self._show_state()
        return removed

    def clear(self) -> int:
        """Forget all keys that are not pinned.

        Returns:
            The number of tokens they held.
        """
        cleared = self._index.clear()
        self._show_state()
        return sum(entry.shapes[0][entry.fmt.token_dim()] for entry in cleared)

    def close(self) -> None:
        """Stop: what is not being written yet is dropped, regions go back."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._allocator.close()
        self._writer.shutdown(wait=False)
        self._reader.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        while self._pending_writes and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._pending_writes:
            logger.error(
                "An RDS write has not ended within %.0f s; going on without it",
                _CLOSE_TIMEOUT_S,
            )
        self._index.clear()
        self._regions.close()

    # ---- failures, state ------------------------------------------------------------

    def _remember(self, error: Exception | None) -> None:
        if self.settings.failure_policy != "raise":
            return
        with self._lock:
            self._failure = self._failure or (
                error if isinstance(error, RDSError) else RDSError(str(error))
            )

    def _surface_failure(self) -> None:
        if self.settings.failure_policy != "raise":
            return
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise RDSError(f"rds_failure_policy is raise: {failure}") from failure

    def _show_state(self) -> None:
        self._metrics.set("chunks", len(self._index))
        self._metrics.set("used_bytes", self._regions.held_bytes)
        free = self._allocator.free_slots * self._allocator.slot_bytes
        self._metrics.set("staging_free_bytes", free)


def _most_regions(settings: RDSSettings, nbytes: int) -> int:
    """Most regions of a size that the settings allow; 0: no limit."""
    limits = []
    if settings.max_chunks:
        limits.append(settings.max_chunks)
    if settings.capacity:
        limits.append(settings.capacity_bytes // nbytes)
        if not limits[-1]:
            raise ValueError(
                f"rds_capacity of {settings.capacity} MiB holds no chunk of {nbytes} "
                "bytes; raise it, or leave it out for no limit"
            )
    return min(limits, default=0)


def _require_usable(
    config: LMCacheEngineConfig,
    metadata: LMCacheMetadata,
    local_cpu_backend: Any,
    device: torch.device,
) -> None:
    if metadata.role == "scheduler":
        raise ValueError(
            "the RDS index is in the worker, the scheduler cannot look it up; set "
            "enable_scheduler_bypass_lookup to false"
        )
    if config.use_layerwise:
        raise ValueError(
            "RDSBackend stores whole chunks; set LMCACHE_USE_LAYERWISE=False"
        )
    if local_cpu_backend is not None or config.local_cpu:
        raise ValueError(
            "RDSBackend works without LMCache's CPU tier; set LMCACHE_LOCAL_CPU=False "
            "and LMCACHE_MAX_LOCAL_CPU_SIZE=0"
        )
    if device.type != "rbln":
        raise ValueError(
            f"RDSBackend needs an RBLN NPU, LMCache runs on {device}; set "
            "LMCACHE_DEVICE_BACKEND=rbln to learn why"
        )
    if metadata.get_num_groups() != 1:
        raise ValueError(
            f"RDSBackend stores one kind of layer, the model has "
            f"{metadata.get_num_groups()} groups"
        )
