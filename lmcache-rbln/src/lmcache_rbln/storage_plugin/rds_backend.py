# SPDX-License-Identifier: Apache-2.0
"""``RDSBackend``: LMCache's storage plugin for chunks on NVMe, next to the NPU."""

# Standard
from collections.abc import Sequence
from concurrent.futures import Future
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
from .rds_device import RDSDevice, RDSError
from .rds_failures import Failures
from .rds_index import ChunkIndex
from .rds_metrics import RDSMetrics
from .rds_reader import ChunkReader
from .rds_regions import RegionPool
from .rds_settings import RDSSettings, read_settings
from .rds_staging import StagingAllocator, all_or_none
from .rds_threads import DaemonThreads
from .rds_transfer import ChunkTransfer, region_bytes
from .rds_waits import StoreWaits, deadline_in
from .rds_writer import ChunkWriter, OnComplete

logger = init_logger(__name__)

# This module is imported when LMCache loads the plugin, before it chooses an allocator.
allocator_choice.install()

#: Longest wait for what is being written and read when the backend is closed.
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
        transfer = ChunkTransfer(self._device, self.settings.checksum)
        overlapped = self.settings.overlaps(metadata.world_size)
        self._failures = Failures(self.settings.failure_policy)
        self._writer = ChunkWriter(
            self._index,
            self._regions,
            transfer,
            self._metrics,
            self._failures,
            overlapped,
            self._show_state,
        )
        self._reader = ChunkReader(
            self._allocator,
            self._index,
            transfer,
            self._metrics,
            self._failures,
            self.settings.wait_timeout,
            self._show_state,
        )
        self._waits = StoreWaits(self.settings.wait_timeout)
        # For what LMCache's event loop must not wait for.
        self._threads = DaemonThreads(2, "rds-reader")
        self._lock = threading.Lock()
        self._closed = False
        self._cut_lookups = False
        # Pinned keys of asynchronous lookups; of the event loop's thread alone.
        self._prefetched: dict[str, list[CacheEngineKey]] = {}
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
            "overlapped" if overlapped else "synchronous",
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
        ``rds_wait_timeout`` for all chunks that are stored together.

        Args:
            shapes: Of the tensors in the chunk.
            dtypes: Of the tensors in the chunk.
            fmt: LMCache's format; ``None`` means KV_2LTD.
            eviction: Not used: what is stored holds no staging memory.
            busy_loop: Not used: the wait is bounded in any case.

        Returns:
            The object with one reference, or ``None``: nothing more is to be stored.
        """
        left = self._waits.left()
        obj = self._allocator.allocate_within(
            shapes, dtypes, fmt, lambda: left() if self._writer.busy else 0.0
        )
        if obj is None:
            self._waits.end()
            self._metrics.add("staging_failures")
        else:
            self._waits.waited(left, obj)
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
        return all_or_none(
            lambda: self.allocate(shapes, dtypes, fmt, eviction, busy_loop), batch_size
        )

    def calculate_chunk_budget(self) -> int:
        """Return how many chunks the staging memory holds."""
        return self._allocator.usable_slots

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
        self._waits.end()
        self._failures.surface()
        future = self._writer.submit(keys, objs, on_complete_callback)
        self._failures.surface()
        self._metrics.observe("submit_seconds", time.perf_counter() - started)
        return None if future is None else [future]

    async def async_batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: OnComplete | None = None,
    ) -> None:
        """Write chunks from the event loop without blocking it."""
        await asyncio.get_running_loop().run_in_executor(
            self._threads,
            lambda: self.batched_submit_put_task(
                keys, objs, transfer_spec, on_complete_callback
            ),
        )

    # ---- lookup ---------------------------------------------------------------------

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Tell whether a key is stored; ``pin`` keeps it from eviction."""
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """Count how many keys in a row are stored.

        Not more than staging memory has slots that can be used: LMCache restores them
        all at once.

        Args:
            keys: Keys in the order of a prompt.
            pin: Whether to keep the counted ones from eviction.
        """
        limit = self._allocator.usable_slots
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
        """Count how many keys in a row are stored; in memory, so it never blocks.

        What ``pin`` keeps is let go when the lookup's chunks have been restored:
        LMCache takes no pin off an asynchronous lookup.
        """
        found = self.batched_contains(keys, pin)
        if pin and found:
            self._prefetched[lookup_id] = keys[:found]
        return found

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
        self._failures.surface()
        objs = self._reader.load(keys)
        try:
            self._failures.surface()
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
        try:
            return self._threads.submit(lambda: self._reader.load([key])[0])
        except RuntimeError:  # closed
            return None

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
        objs: list[MemoryObj | None] = []
        try:
            load = self._threads.submit(self._reader.load, keys)
            # Not what is awaited: that is cancelled both with this call and by close.
            done = asyncio.wrap_future(load)
            await asyncio.wait([done])
            if not load.cancelled():
                objs = done.result()
        except RuntimeError:  # closed
            pass
        finally:
            for key in self._prefetched.pop(lookup_id, ()):
                self._index.unpin(key)
        prefix = list(itertools.takewhile(lambda obj: obj is not None, objs))
        for obj in objs[len(prefix) :]:
            if obj is not None:
                obj.ref_count_down()
        return cast("list[MemoryObj]", prefix)

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
        left = deadline_in(_CLOSE_TIMEOUT_S)
        self._allocator.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._writer.close(_CLOSE_TIMEOUT_S)
        self._index.close()
        self._regions.close()
        # A thread that Python ends in the middle of a copy may take the process along.
        if not self._threads.join(left()):
            logger.error(
                "An RDS read has not ended within %.0f s; going on without it",
                _CLOSE_TIMEOUT_S,
            )

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
    if not hasattr(torch.rbln, "Stream"):
        raise ValueError(
            "RDSBackend needs streams of the NPU, which this torch-rbln does not have; "
            "install torch-rbln 0.12.0"
        )
    if metadata.get_num_groups() != 1:
        raise ValueError(
            f"RDSBackend stores one kind of layer, the model has "
            f"{metadata.get_num_groups()} groups"
        )
