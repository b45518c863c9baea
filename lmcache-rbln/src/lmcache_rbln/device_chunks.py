# SPDX-License-Identifier: Apache-2.0
"""Chunks on the device: whole KV blocks, from and to vLLM's paged cache.

Nothing but the same device reads such a chunk, so it keeps the device's own order:
layer by layer, the chunk's blocks as they lie in the paged cache.

==========================  =============================  ========================
paged cache                 chunk of n blocks              name
==========================  =============================  ========================
``[NB, 2, NH, 1, BS, HS]``  ``[L, n, 2, NH, 1, BS, HS]``   rbln-blocks-first-hnd/1
``[2, NB, NH, 1, BS, HS]``  ``[L, 2, n, NH, 1, BS, HS]``   rbln-kv-first-hnd/1
``[NB, BS, HS]`` (MLA)      ``[L, n, BS, HS]``             rbln-mla/1
==========================  =============================  ========================
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

# Third Party
import torch

# First Party
from lmcache.lmcache_native import EngineKVFormat, TransferDirection
from lmcache.v1.platform.devices.rbln.block_transfer import StillInFlightError
from lmcache.v1.platform.devices.rbln.lmcache_release import BLOCKS_FIRST
from lmcache_rbln.kv_cache import ChunkBlocks, PagedKV

# Format of the paged cache -> name of a device chunk's layout.
_LAYOUTS = {
    BLOCKS_FIRST: "rbln-blocks-first-hnd/1",
    EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS: "rbln-kv-first-hnd/1",
    EngineKVFormat.NL_X_NB_BS_HS: "rbln-mla/1",
}


@runtime_checkable
class DeviceChunk(Protocol):
    """A memory object on the device.

    Attributes:
        payload: Its memory, flat uint8.
        layout: Name of the order of the bytes in it.
        block_size: Tokens per block of that layout.
        payload_bytes: Bytes of it that are filled.
    """

    layout: str
    block_size: int
    payload_bytes: int

    @property
    def payload(self) -> torch.Tensor: ...

    def retire(self) -> None:
        """Let nobody use the memory again: copies on it may be under way for ever."""


def retire_if_in_flight(error: BaseException, chunks: Sequence[DeviceChunk]) -> None:
    """Retire chunks whose copies may not have ended.

    Args:
        error: What the copies ended with. An interrupt may hide that they go on.
        chunks: The chunks.
    """
    if isinstance(error, StillInFlightError) or not isinstance(error, Exception):
        for chunk in chunks:
            chunk.retire()


@torch.inference_mode()
def move_on_device(
    kv: PagedKV, direction: TransferDirection, chunks: list[ChunkBlocks]
) -> None:
    """Copy whole blocks between the paged cache and chunks; complete on return.

    Args:
        kv: The paged cache.
        direction: ``D2H`` fills the chunks, ``H2D`` writes the cache.
        chunks: Their memory objects are :class:`DeviceChunk`.

    Raises:
        ValueError: Chunks, blocks and cache do not fit; nothing was copied.
        RuntimeError: The device failed.
    """
    gathers = direction == TransferDirection.D2H
    layout = _LAYOUTS[kv.kv_format]
    block = len(kv.layers) * kv.desc.kv_size * kv.desc.bs * kv.hidden_size
    objs: list[DeviceChunk] = []
    tensors: list[torch.Tensor] = []
    for chunk in chunks:
        obj: object = chunk.memory_obj
        if not isinstance(obj, DeviceChunk):
            raise ValueError(
                f"memory objects on {kv.device} without a storage backend that keeps "
                f"chunks there: {obj!r}"
            )
        if not gathers and (obj.layout, obj.block_size) != (layout, kv.desc.bs):
            raise ValueError(
                f"the chunk is laid out as {obj.layout} with blocks of "
                f"{obj.block_size} tokens, the KV cache as {layout} with blocks of "
                f"{kv.desc.bs}"
            )
        objs.append(obj)
        tensors.append(obj.payload.view(kv.dtype)[: len(chunk.block_ids) * block])
    ops: Any = kv.ops
    try:
        ops.copy_blocks_on_device(
            kv.layers,
            tensors,
            [chunk.block_ids for chunk in chunks],
            direction,
            kv.kv_format,
            [chunk.skip_blocks for chunk in chunks],
        )
    except BaseException as error:
        retire_if_in_flight(error, objs)
        raise
    if gathers:
        for obj, tensor in zip(objs, tensors, strict=True):
            obj.layout, obj.block_size = layout, kv.desc.bs
            obj.payload_bytes = tensor.nbytes
