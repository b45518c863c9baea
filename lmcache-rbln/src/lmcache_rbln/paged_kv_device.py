# SPDX-License-Identifier: Apache-2.0
"""Moves whole KV blocks between vLLM's paged cache and chunks on the same device.

Nothing but the device reads such a chunk, so it keeps the device's own order: layer
by layer, and in each the blocks of the chunk as they lie in the paged cache.

==========================  =============================
paged cache                 chunk of n blocks
==========================  =============================
``[NB, 2, NH, 1, BS, HS]``  ``[L, n, 2, NH, 1, BS, HS]``
``[2, NB, NH, 1, BS, HS]``  ``[L, 2, n, NH, 1, BS, HS]``
``[NB, BS, HS]`` (MLA)      ``[L, n, BS, HS]``
==========================  =============================

Neighbouring blocks go in one copy.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterator, Sequence
from typing import cast

# Third Party
import torch

# First Party
from lmcache.lmcache_native import EngineKVFormat
from lmcache.v1.platform.devices.rbln.kv_formats import BLOCKS_FIRST
from lmcache_rbln.device_streams import InFlightError, streams_of
from lmcache_rbln.paged_kv import ChunkBlocks, PagedKV
from lmcache_rbln.storage_plugin.rds_staging import StagedMemoryObj

# Format of the paged cache -> name of the chunk's layout, axis of the blocks.
_LAYOUTS = {
    BLOCKS_FIRST: ("rbln-blocks-first-hnd/1", 0),
    EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS: ("rbln-kv-first-hnd/1", 1),
    EngineKVFormat.NL_X_NB_BS_HS: ("rbln-mla/1", 0),
}


class DeviceBlockTransfer:
    """Gathers into and scatters from device staging memory.

    Both come behind all that the caller has queued on its current stream, and are
    complete on return: nothing is left that could fail later and be told to somebody
    else. Any number of threads may call.
    """

    @torch.inference_mode()  # as LMCache calls it; views cost half of the time then
    def gather(self, kv: PagedKV, chunks: Sequence[ChunkBlocks]) -> None:
        """Copy blocks of the paged cache into chunks; complete on return.

        Args:
            kv: The paged cache.
            chunks: Chunks in staging memory.

        Raises:
            ValueError: Chunks, blocks and cache do not fit; nothing was copied.
            RuntimeError: The device failed.
        """
        name, axis = _layout(kv)
        pairs = [
            (chunk_part, cache_part)
            for chunk in chunks
            for chunk_part, cache_part in _runs(kv, axis, chunk, 0)
        ]
        _copy_all(kv, chunks, pairs)
        for chunk in chunks:
            obj = cast(StagedMemoryObj, chunk.memory_obj)
            obj.layout, obj.block_size = name, kv.block_size
            obj.payload_bytes = len(chunk.block_ids) * _block_bytes(kv)

    @torch.inference_mode()  # likewise; and what was made in it can be written only so
    def scatter(self, kv: PagedKV, chunks: Sequence[ChunkBlocks]) -> None:
        """Copy chunks into blocks of the paged cache; complete on return.

        Args:
            kv: The paged cache.
            chunks: Chunks in staging memory, with the leading blocks to leave alone.

        Raises:
            ValueError: Chunks, blocks and cache do not fit; nothing was copied.
            RuntimeError: The device failed.
        """
        name, axis = _layout(kv)
        for chunk in chunks:
            obj = cast(StagedMemoryObj, chunk.memory_obj)
            if (obj.layout, obj.block_size) != (name, kv.block_size):
                raise ValueError(
                    f"the chunk is laid out as {obj.layout} with blocks of "
                    f"{obj.block_size} tokens, the KV cache as {name} with blocks of "
                    f"{kv.block_size}"
                )
        pairs = [
            (cache_part, chunk_part)
            for chunk in chunks
            for chunk_part, cache_part in _runs(kv, axis, chunk, chunk.skip_blocks)
        ]
        written = [block for chunk in chunks for block in chunk.block_ids]
        if len(set(written)) != len(written):
            raise ValueError("a block is to be written twice")
        if pairs:
            _copy_all(kv, chunks, pairs)


def _copy_all(
    kv: PagedKV,
    chunks: Sequence[ChunkBlocks],
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Copy pairs of target and source on a stream of their own."""
    try:
        with streams_of(kv.device).transfer(ordered=True) as copies:
            for target, source in pairs:
                copies.copy(target, source)
    except InFlightError:
        for chunk in chunks:
            cast(StagedMemoryObj, chunk.memory_obj).retire()
        raise


def _layout(kv: PagedKV) -> tuple[str, int]:
    if kv.kv_format not in _LAYOUTS:
        raise ValueError(
            f"a KV cache of format {kv.kv_format} cannot be stored from the device"
        )
    return _LAYOUTS[kv.kv_format]


def _block_bytes(kv: PagedKV) -> int:
    """Bytes of one block over all layers and planes."""
    tokens = len(kv.layers) * kv.planes * kv.block_size
    return tokens * kv.hidden_size * kv.dtype.itemsize


def _runs(
    kv: PagedKV, axis: int, chunk: ChunkBlocks, skip: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of chunk part and cache part, contiguous and equal in shape."""
    obj, ids = chunk.memory_obj, chunk.block_ids
    if not isinstance(obj, StagedMemoryObj):
        raise ValueError(
            f"a memory object on {kv.device} that is not RDS staging memory: {obj!r}"
        )
    if ids and not 0 <= min(ids) <= max(ids) < kv.num_blocks:
        raise ValueError(
            f"blocks {min(ids)} to {max(ids)} wanted of a KV cache of {kv.num_blocks}"
        )
    nbytes = len(ids) * _block_bytes(kv)
    if nbytes > obj.slot.payload.numel():
        raise ValueError(
            f"{len(ids)} blocks are {nbytes} bytes, more than the staging memory's "
            f"{obj.slot.payload.numel()}"
        )
    shape = list(kv.layers[0].shape)
    shape[axis] = len(ids)
    whole = obj.slot.payload[:nbytes].view(kv.dtype).view(len(kv.layers), *shape)
    if axis == 1:
        # One copy per plane, so that each is contiguous.
        whole = whole.view(-1, *shape[1:])
    for first, count in _neighbours(ids, skip):
        # In few calls: a call that makes a view takes longer than one that copies.
        chunk_parts = whole[:, first : first + count].unbind(0)
        blocks = slice(ids[first], ids[first] + count)
        if axis == 0:
            cache_parts = [layer[blocks] for layer in kv.layers]
        else:
            cache_parts = [
                plane for layer in kv.layers for plane in layer[:, blocks].unbind(0)
            ]
        yield from zip(chunk_parts, cache_parts, strict=True)


def _neighbours(ids: list[int], skip: int) -> Iterator[tuple[int, int]]:
    """Position and length of each run of consecutive ids, from ``skip`` on."""
    first = skip
    for position in range(skip + 1, len(ids) + 1):
        if position == len(ids) or ids[position] != ids[position - 1] + 1:
            yield first, position - first
            first = position
