# SPDX-License-Identifier: Apache-2.0
"""Device staging memory: a fixed number of slots, one chunk each.

A slot is made once, when the backend starts, and used again and again, so the NPU
memory of the backend never changes. A memory object of LMCache holds a slot from its
allocation until its last reference is gone.
"""

# Standard
from collections import deque
from collections.abc import Callable
import threading

# Third Party
import torch

# First Party
from lmcache.logging import init_logger
from lmcache.utils import get_size_bytes
from lmcache.v1.memory_management import (
    MemoryAllocatorInterface,
    MemoryFormat,
    MemoryObj,
    MemoryObjMetadata,
    TensorMemoryObj,
)

# Local
from .device import RDSDevice, RDSError, aligned
from .header import HEADER_BYTES

logger = init_logger(__name__)

#: Layout of a chunk that nobody has said otherwise of: LMCache's own.
TOKEN_MAJOR = "token-major/1"

_Shapes = torch.Size | list[torch.Size]
_Dtypes = torch.dtype | list[torch.dtype]


class Slot:
    """Device memory for one chunk and its header.

    Attributes:
        number: Names it.
        payload: Flat uint8 tensor on the device, covering its storage.
        header: 4096 bytes on the device, covering its storage.
    """

    def __init__(self, number: int, device: RDSDevice, payload_bytes: int) -> None:
        self.number = number
        self.payload = device.empty(payload_bytes)
        self.header = device.empty(HEADER_BYTES)


class StagedMemoryObj(TensorMemoryObj):
    """A chunk in device staging memory, a ``DeviceChunk`` of ``paged_kv``.

    Attributes:
        slot: Its memory.
        layout: Name of the order of its elements.
        block_size: Tokens per block of that layout; 0 if it has no blocks.
        payload_bytes: Bytes of the slot that the chunk fills; more than LMCache's size
            of it where its last block is filled in part.
        retired: Whether the slot must not be used again.
    """

    def __init__(
        self, slot: Slot, metadata: MemoryObjMetadata, parent: "StagingAllocator"
    ) -> None:
        # First of all: one whose making is interrupted gives its slot back too.
        self.slot = slot
        self.retired = False
        super().__init__(slot.payload, metadata, parent)
        self.layout = TOKEN_MAJOR
        self.block_size = 0
        self.payload_bytes = metadata.get_size()

    @property
    def payload(self) -> torch.Tensor:
        """All of the slot, flat uint8 on the device."""
        return self.slot.payload

    def retire(self) -> None:
        """Never use the slot again: device work on it may be under way for ever."""
        self.retired = True


class StagingAllocator(MemoryAllocatorInterface):
    """Hands out slots as memory objects.

    Args:
        device: Makes the device memory.
        buffer_bytes: Most device memory to use.
        chunk_bytes: Size of a full chunk.

    Raises:
        ValueError: Not even one chunk fits.
        RDSError: The NPU has not that much memory left.
    """

    def __init__(self, device: RDSDevice, buffer_bytes: int, chunk_bytes: int) -> None:
        self.slot_bytes = aligned(chunk_bytes)
        self.num_slots = buffer_bytes // (self.slot_bytes + HEADER_BYTES)
        if self.num_slots < 1:
            needed = -(-(self.slot_bytes + HEADER_BYTES) // (1 << 20))
            raise ValueError(
                f"rds_buffer_size of {buffer_bytes >> 20} MiB holds no chunk of "
                f"{chunk_bytes} bytes; set it to {needed} or more, or lower "
                "LMCACHE_CHUNK_SIZE"
            )
        try:
            slots = [Slot(n, device, self.slot_bytes) for n in range(self.num_slots)]
        except RDSError as error:
            raise RDSError(
                f"rds_buffer_size of {buffer_bytes >> 20} MiB does not fit into the "
                f"memory that is left on {device.device}: {error}; lower it, or give "
                "vLLM less with --gpu-memory-utilization"
            ) from error
        self._free = deque(slots)
        self._used = 0
        # Not let go either: their memory is not for others.
        self._retired: list[Slot] = []
        # Entered by itself: between the calls of a condition an interrupt leaks it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False

    def allocate(
        self,
        shapes: _Shapes,
        dtypes: _Dtypes,
        fmt: MemoryFormat | None = MemoryFormat.KV_2LTD,
        allocator_type: str | None = None,
    ) -> StagedMemoryObj | None:
        """Take a free slot; see the interface. ``fmt=None`` means KV_2LTD."""
        return self.allocate_within(shapes, dtypes, fmt, lambda: 0.0)

    def allocate_within(
        self,
        shapes: _Shapes,
        dtypes: _Dtypes,
        fmt: MemoryFormat | None,
        seconds_left: Callable[[], float],
    ) -> StagedMemoryObj | None:
        """Take a free slot, or wait for one.

        Args:
            shapes: Of the tensors in the chunk.
            dtypes: Of the tensors in the chunk.
            fmt: LMCache's format; ``None`` means KV_2LTD.
            seconds_left: Called while there is none; returns how long to wait still,
                0 to give up.

        Returns:
            The object with one reference, or ``None``.
        """
        shapes, dtypes = self._adapt_shapes_and_dtypes(shapes, dtypes)
        nbytes = get_size_bytes(shapes, dtypes)
        if nbytes > self.slot_bytes or nbytes <= 0:
            logger.warning(
                "A chunk of %d bytes was asked for, slots of the RDS staging memory "
                "have %d: it is not stored",
                nbytes,
                self.slot_bytes,
            )
            return None
        with self._lock:
            while not self._free:
                seconds = 0.0 if self._closed else seconds_left()
                if seconds <= 0:
                    return None
                self._changed.wait(seconds)
            slot = self._free.popleft()
            metadata = MemoryObjMetadata(
                shape=shapes[0],
                dtype=dtypes[0],
                address=slot.number,
                phy_size=self.slot_bytes,
                ref_count=1,
                fmt=MemoryFormat.KV_2LTD if fmt is None else fmt,
                shapes=shapes,
                dtypes=dtypes,
            )
            # Not kept: an object that is lost gives its slot back when it is collected.
            self._used += 1
        return StagedMemoryObj(slot, metadata, self)

    def batched_allocate(
        self,
        shapes: _Shapes,
        dtypes: _Dtypes,
        batch_size: int,
        fmt: MemoryFormat | None = MemoryFormat.KV_2LTD,
        allocator_type: str | None = None,
    ) -> list[MemoryObj] | None:
        """Take several free slots, or none; see the interface."""
        return all_or_none(lambda: self.allocate(shapes, dtypes, fmt), batch_size)

    def free(self, memory_obj: MemoryObj, allocator_type: str | None = None) -> None:
        """Give an object's slot back; a second time does nothing.

        LMCache calls this with the object's lock held, and again when the object is
        garbage collected.
        """
        if not isinstance(memory_obj, StagedMemoryObj):
            raise TypeError(f"not an object of the RDS staging memory: {memory_obj!r}")
        with self._lock:
            if not memory_obj.is_valid():
                return
            memory_obj.invalidate()
            self._used -= 1
            slots = self._retired if memory_obj.retired else self._free
            slots.append(memory_obj.slot)
            self._changed.notify_all()

    def batched_free(
        self,
        memory_objs: list[MemoryObj],
        allocator_type: str | None = None,
        update_stats: bool = True,
    ) -> None:
        """Give several objects' slots back."""
        for obj in memory_objs:
            self.free(obj)

    @property
    def free_slots(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def usable_slots(self) -> int:
        """Slots that are not retired."""
        return self.num_slots - len(self._retired)

    def memcheck(self) -> bool:
        """Tell whether every slot is free, held or retired, once."""
        with self._lock:
            known = {slot.number for slot in (*self._free, *self._retired)}
            return len(known) + self._used == self.num_slots

    def close(self) -> None:
        """Let nobody wait for memory any more."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()


def all_or_none(
    allocate: Callable[[], MemoryObj | None], count: int
) -> list[MemoryObj] | None:
    """Take memory so many times; ``None``, and all is given back, if it failed once."""
    objs: list[MemoryObj] = []
    for _ in range(count):
        obj = allocate()
        if obj is None:
            for taken in objs:
                taken.ref_count_down()
            return None
        objs.append(obj)
    return objs
