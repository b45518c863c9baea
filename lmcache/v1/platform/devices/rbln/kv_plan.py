# SPDX-License-Identifier: Apache-2.0
"""What one transfer copies, and in which order. No byte moves here.

A transfer is a list of :class:`Piece`: a region that is contiguous on the device, in
every layer, and one strided window of a chunk.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# First Party
from lmcache.v1.platform.devices.rbln.kv_layout import KVGeometry


class Piece(NamedTuple):
    """One region of every layer that is contiguous on the device.

    The device side is ``view[layer][block : block + blocks, plane : plane + planes,
    head : head + heads, slot : slot + slots]``. The chunk side is the same heads and
    planes of tokens ``token .. token + blocks * slots``.

    Attributes:
        chunk: Index of the chunk in the call.
        block: First paged block id.
        blocks: Number of adjacent block ids.
        plane: First plane.
        planes: Number of planes.
        head: First head.
        heads: Number of heads.
        slot: First token slot inside each block.
        slots: Number of token slots of each block.
        token: First token inside the chunk.
    """

    chunk: int
    block: int
    blocks: int
    plane: int
    planes: int
    head: int
    heads: int
    slot: int
    slots: int
    token: int

    def elements(self, head_size: int) -> int:
        """Return how many elements the piece holds in each layer."""
        return self.blocks * self.planes * self.heads * self.slots * head_size


def plan_pieces(
    geometry: KVGeometry,
    chunk_tokens: Sequence[int],
    chunk_blocks: Sequence[Sequence[int]],
    skip_blocks: int,
    max_elements: int,
) -> Iterator[Piece]:
    """Cut a transfer into pieces that are contiguous on the device.

    A piece is as large as the layout and ``max_elements`` allow: runs of adjacent
    block ids and the two planes of a block join where they lie together, and a
    head-block that is too large is split by plane, then heads, then tokens.

    Args:
        geometry: Geometry of the KV cache.
        chunk_tokens: Tokens of each chunk; a chunk may end inside its last block.
        chunk_blocks: Block ids of each chunk, in token order.
        skip_blocks: Leading blocks of the whole call that are left out.
        max_elements: Largest piece, at least ``head_size``.

    Yields:
        Pieces, chunk by chunk, each element of a layer exactly once.
    """
    seen = 0
    for chunk, (tokens, blocks) in enumerate(
        zip(chunk_tokens, chunk_blocks, strict=True)
    ):
        first = min(len(blocks), max(0, skip_blocks - seen))
        seen += len(blocks)
        whole = min(len(blocks), tokens // geometry.block_size)
        yield from _split_whole_blocks(
            geometry, chunk, blocks, first, whole, max_elements
        )
        # The slots of a partial block are contiguous within one head only.
        for position in range(max(first, whole), len(blocks)):
            slots = tokens - position * geometry.block_size
            yield from _split_slots(
                geometry,
                chunk,
                blocks[position],
                position,
                slots,
                max_elements,
                range(geometry.num_planes),
            )


def _split_whole_blocks(
    geometry: KVGeometry,
    chunk: int,
    blocks: Sequence[int],
    first: int,
    end: int,
    max_elements: int,
) -> Iterator[Piece]:
    """Yield the pieces of whole blocks ``blocks[first:end]`` of one chunk."""
    planes, heads, slots = (
        geometry.num_planes,
        geometry.num_heads,
        geometry.block_size,
    )
    head = slots * geometry.head_size
    head_block = heads * head
    planes_adjacent = planes == 1 or geometry.strides[1] == head_block
    if not planes_adjacent or planes * head_block > max_elements:
        planes = 1
    heads = min(heads, max(1, max_elements // head))
    run_limit = 1
    if heads == geometry.num_heads and geometry.strides[0] == planes * head_block:
        run_limit = max(1, max_elements // (planes * head_block))
    position = first
    while position < end:
        run = 1
        while (
            run < run_limit
            and position + run < end
            and blocks[position + run] == blocks[position] + run
        ):
            run += 1
        for plane in range(0, geometry.num_planes, planes):
            if head > max_elements:
                yield from _split_slots(
                    geometry,
                    chunk,
                    blocks[position],
                    position,
                    slots,
                    max_elements,
                    range(plane, plane + 1),
                )
                continue
            for start in range(0, geometry.num_heads, heads):
                yield Piece(
                    chunk=chunk,
                    block=blocks[position],
                    blocks=run,
                    plane=plane,
                    planes=planes,
                    head=start,
                    heads=min(heads, geometry.num_heads - start),
                    slot=0,
                    slots=slots,
                    token=position * slots,
                )
        position += run


def _split_slots(
    geometry: KVGeometry,
    chunk: int,
    block: int,
    position: int,
    slots: int,
    max_elements: int,
    planes: range,
) -> Iterator[Piece]:
    """Yield the first ``slots`` token slots of one block, head by head."""
    step = max(1, max_elements // geometry.head_size)
    for plane in planes:
        for head in range(geometry.num_heads):
            for slot in range(0, slots, step):
                yield Piece(
                    chunk=chunk,
                    block=block,
                    blocks=1,
                    plane=plane,
                    planes=1,
                    head=head,
                    heads=1,
                    slot=slot,
                    slots=min(step, slots - slot),
                    token=position * geometry.block_size + slot,
                )
