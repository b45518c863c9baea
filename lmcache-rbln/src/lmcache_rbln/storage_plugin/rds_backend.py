# SPDX-License-Identifier: Apache-2.0
"""``RDSBackend``: LMCache's storage plugin for chunks on NVMe, next to the NPU."""

# Standard
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast
import asyncio
import itertools
import time

# Third Party
import torch

# First Party
from lmcache.logging import init_logger
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.metadata import LMCacheMetadata

# Local
from .rds.device import RDSDevice, RDSError
from .rds.memory import StagingMemory
from .rds.settings import read_settings
from .rds.store import ChunkStore, OnComplete
from .rds.threads import DaemonThreads

logger = init_logger(__name__)

#: Longest wait for what is being written and read when the backend is closed.
_CLOSE_TIMEOUT_S = 9.0


class RDSBackend(StagingMemory):
    """Keeps KV chunks on the NVMe of Rebellions Direct Storage.

    Chunks go from the NPU to the NVMe and back without passing through host memory.
    The index is in memory: a restarted worker begins with nothing. Any number of
    threads may call.

    Args:
        config: LMCache's configuration; ``rds_*`` in its extra config is for this.
        metadata: LMCache's metadata of the model and the worker.
        local_cpu_backend: Not used: the CPU tier is off, which the settings are checked
            for, and so is all else that this backend can't do.
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
        settings = read_settings(config.extra_config)
        if not hasattr(torch.rbln, "Stream"):
            raise ValueError(
                "RDSBackend needs streams of the NPU, which this torch-rbln does not "
                "have; install torch-rbln 0.12.0"
            )
        if (groups := metadata.get_num_groups()) != 1:
            raise ValueError(
                f"RDSBackend stores one kind of layer, the model has {groups} groups"
            )
        self.loop = loop
        device = RDSDevice(torch.device(dst_device), settings.numa_node)
        super().__init__(device, settings, config, metadata)
        overlapped = settings.overlaps(metadata.world_size)
        self._store = ChunkStore(
            device, self._allocator, self._metrics, settings, overlapped
        )
        # For what LMCache's event loop must not wait for.
        self._threads = DaemonThreads(2, "rds-reader")
        self._cut_lookups = False
        if settings.checksum == "header":
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
            self._store.limit or "as many as fit",
            settings.failure_policy,
        )
        self._store.show_state()

    def __str__(self) -> str:
        return self.__class__.__name__

    # ---- store ----------------------------------------------------------------------

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """Tell whether a key is being written."""
        return self._store.index.is_writing(key)

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
        self.end_wait()
        self._store.raise_pending()
        future = self._store.put(keys, objs, on_complete_callback)
        self._store.raise_pending()
        self._metrics["submit_seconds"].observe(time.perf_counter() - started)
        return None if future is None else [future]

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
        found = self._store.index.count_prefix(keys, pin, limit)
        if found == limit < len(keys) and not self._cut_lookups:
            self._cut_lookups = True
            logger.warning(
                "A prompt of %d chunks is restored up to chunk %d, which is what "
                "rds_buffer_size holds; raise it to restore longer prompts",
                len(keys),
                limit,
            )
        self._metrics["lookup_hits"].inc(found)
        self._metrics["lookup_misses"].inc(len(keys) - found)
        return found

    async def batched_async_contains(
        self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False
    ) -> int:
        """Count how many keys in a row are stored; in memory, so it never blocks.

        Nothing is pinned: LMCache takes no pin off an asynchronous lookup, restores at
        once, and answers with what was restored.
        """
        return self.batched_contains(keys)

    def pin(self, key: CacheEngineKey) -> bool:
        """Keep a key from eviction."""
        return self._store.index.pin(key)

    def unpin(self, key: CacheEngineKey) -> bool:
        """Allow a key's eviction again."""
        return self._store.index.unpin(key)

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
        self._store.raise_pending()
        objs = self._store.load(keys)
        try:
            self._store.raise_pending()
        except RDSError:
            _let_go(objs)
            raise
        return objs

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
            load = self._threads.submit(self._store.load, keys)
            # Not what is awaited: that is cancelled both with this call and by close.
            done = asyncio.wrap_future(load)
            await asyncio.wait([done])
            if not load.cancelled():
                objs = done.result()
        except RuntimeError:  # closed
            pass
        prefix = list(itertools.takewhile(lambda obj: obj is not None, objs))
        _let_go(objs[len(prefix) :])
        return cast("list[MemoryObj]", prefix)

    # ---- removal, end ---------------------------------------------------------------

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Forget a key; a pinned one only with ``force``."""
        removed = self._store.index.remove(key, force)
        self._store.show_state()
        return removed

    def clear(self) -> int:
        """Forget all keys that are not pinned; returns how many tokens they held."""
        cleared = self._store.index.clear()
        self._store.show_state()
        return sum(entry.shapes[0][entry.fmt.token_dim()] for entry in cleared)

    def close(self) -> None:
        """Stop: what is not being written yet is dropped, regions go back."""
        end = time.monotonic() + _CLOSE_TIMEOUT_S
        self._allocator.close()
        self._threads.close(cancel=True)
        self._store.close(_CLOSE_TIMEOUT_S)
        # A thread that Python ends in the middle of a copy may take the process along.
        if not self._threads.join(max(0.0, end - time.monotonic())):
            logger.error(
                "An RDS read has not ended within %.0f s; going on without it",
                _CLOSE_TIMEOUT_S,
            )
        self._store.io.close()


def _let_go(objs: Sequence[MemoryObj | None]) -> None:
    for obj in objs:
        if obj is not None:
            obj.ref_count_down()
