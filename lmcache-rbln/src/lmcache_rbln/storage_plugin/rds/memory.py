# SPDX-License-Identifier: Apache-2.0
"""Staging memory as LMCache asks a storage backend for it, and how long that waits."""

# Standard
import threading
import time

# Third Party
import torch

# First Party
from lmcache.utils import get_size_bytes
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.abstract_backend import AllocatorBackendInterface

# Local
from .device import RDSDevice
from .metrics import metrics_of
from .settings import RDSSettings
from .staging import StagingAllocator, all_or_none
from .store import ChunkStore


class StagingMemory(AllocatorBackendInterface):
    """What ``RDSBackend`` does with memory; see there."""

    _store: ChunkStore

    def __init__(
        self,
        device: RDSDevice,
        settings: RDSSettings,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
    ) -> None:
        super().__init__(dst_device=str(device.device))
        self.config = config
        self.metadata = metadata
        self._device = device
        self._settings = settings
        self._metrics = metrics_of(config, metadata)
        self._allocator = self.initialize_allocator(config, metadata)
        # Until when the store that a thread is putting together may wait.
        self._waits = threading.local()

    def initialize_allocator(
        self, config: LMCacheEngineConfig, metadata: LMCacheMetadata
    ) -> StagingAllocator:
        """Make the device staging memory for full chunks of the model."""
        chunk_bytes = get_size_bytes(metadata.get_shapes(), metadata.get_dtypes())
        return StagingAllocator(self._device, self._settings.buffer_bytes, chunk_bytes)

    def get_memory_allocator(self) -> StagingAllocator:
        """Return the device staging memory."""
        return self._allocator

    def get_allocator_backend(self) -> "StagingMemory":
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
        ``rds_wait_timeout`` from the first chunk of a store on: LMCache asks for one
        after the other, in one thread, and hands them over together.

        Args:
            shapes: Of the tensors in the chunk.
            dtypes: Of the tensors in the chunk.
            fmt: LMCache's format; ``None`` means KV_2LTD.
            eviction, busy_loop: Not used: what is stored holds no staging memory, and
                the wait is bounded.

        Returns:
            The object with one reference, or ``None``: nothing more is to be stored.
        """
        now = time.monotonic()
        end = getattr(self._waits, "end", now)
        if end <= now:
            end = self._waits.end = now + self._settings.wait_timeout
        obj = self._allocator.allocate_within(
            shapes,
            dtypes,
            fmt,
            lambda: end - time.monotonic() if self._store.busy else 0.0,
        )
        if obj is None:
            self._waits.end = now
            self._metrics["staging_failures"].inc()
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
        return all_or_none(lambda: self.allocate(shapes, dtypes, fmt), batch_size)

    def calculate_chunk_budget(self) -> int:
        """Return how many chunks the staging memory holds."""
        return self._allocator.usable_slots

    def end_wait(self) -> None:
        """Let the thread's next store wait anew."""
        self._waits.end = 0.0
