# SPDX-License-Identifier: Apache-2.0
"""What one transfer copies, and in which order. No byte moves here.

A transfer is a list of :class:`Piece`: a region that is contiguous on the device, in
every layer, and one strided window of a chunk. :class:`Moves` repeats them for each
layer, as arrays, and packs them into staging buffers: the cost of a piece in Python
would otherwise be that of copying it.
"""

# Future
from __future__ import annotations

# Standard
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple

# Third Party
import numpy as np
import torch

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


#: Columns of :attr:`Moves.tiles`; those of ``lmcache.kv_transpose``.
TILE_COLUMNS = (
    "staged",
    "chunk",
    "layer",
    "plane",
    "planes",
    "token",
    "blocks",
    "slots",
    "head",
    "heads",
)
_PIECE_COLUMN = {name: index for index, name in enumerate(Piece._fields)}
#: Where each column of a tile comes from; "staged" and "layer" are in no piece.
_FROM_PIECE = [_PIECE_COLUMN.get(name, 0) for name in TILE_COLUMNS]
_STAGED, _LAYER = TILE_COLUMNS.index("staged"), TILE_COLUMNS.index("layer")
_NO_TILES = np.empty((0, len(TILE_COLUMNS)), dtype=np.int64)
_tile_of = itemgetter(*_FROM_PIECE)
_chunk_of = attrgetter("chunk")


def _starts(geometry: KVGeometry, pieces: Sequence[Piece]) -> list[int]:
    """Return where the pieces start in a layer, in elements from its view's first."""
    blocks, planes, heads, slots, _ = geometry.strides
    return [
        piece.block * blocks
        + piece.plane * planes
        + piece.head * heads
        + piece.slot * slots
        for piece in pieces
    ]


class Moves:
    """The pieces of a transfer in each layer: chunk by chunk, then layer by layer.

    Args:
        geometry: Geometry of the KV cache.
        pieces: What to copy in every layer, ordered by chunk.

    Attributes:
        tiles: int64 ``[n, 10]``, the windows of chunks; columns are ``TILE_COLUMNS``,
            of which ``staged`` is set by :meth:`pack`.
        layers: Layer of each move.
        starts: Where its device region starts, in elements from the view's first.
        sizes: Its elements.
        dtype: Their type.
    """

    def __init__(self, geometry: KVGeometry, pieces: Iterable[Piece]) -> None:
        # A transfer waits for this, so it is lists that repeat, not many small arrays.
        self.dtype = geometry.dtype
        self.layers: list[int] = []
        self.starts: list[int] = []
        self.sizes: list[int] = []
        tables: list[np.ndarray] = []
        every_layer = range(geometry.num_layers)
        for _, group in groupby(pieces, key=_chunk_of):
            in_chunk = list(group)
            self.layers += [layer for layer in every_layer for _ in in_chunk]
            self.starts += _starts(geometry, in_chunk) * geometry.num_layers
            self.sizes += [
                piece.elements(geometry.head_size) for piece in in_chunk
            ] * geometry.num_layers
            rows = np.array(list(map(_tile_of, in_chunk)), dtype=np.int64)
            tables += [rows] * geometry.num_layers
        self.tiles = np.concatenate(tables) if tables else _NO_TILES.copy()
        self.tiles[:, _LAYER] = self.layers
        self._ends = list(accumulate(self.sizes))

    @property
    def all(self) -> range:
        """Indices of all moves."""
        return range(len(self.sizes))

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole transfer."""
        return self.bytes_of(self.all)

    def elements_of(self, batch: range) -> int:
        """Return the elements of some consecutive moves."""
        return self._end(batch.stop) - self._end(batch.start)

    def bytes_of(self, batch: range) -> int:
        """Return the bytes of some consecutive moves."""
        return self.elements_of(batch) * self.dtype.itemsize

    def tiles_of(self, batch: range) -> np.ndarray:
        """Return the tiles of some consecutive moves."""
        return self.tiles[batch.start : batch.stop]

    def pack(self, buffer_bytes: int) -> list[range]:
        """Pack consecutive moves into buffers, one after the other without gaps.

        Args:
            buffer_bytes: Bytes of a buffer, or less to fill it in part; a move that is
                larger has one of its own.

        Returns:
            The moves of each buffer; the ``staged`` column now holds their offsets.
        """
        room = buffer_bytes // self.dtype.itemsize
        batches: list[range] = []
        offsets: list[int] = []
        first = 0
        while first < len(self._ends):
            base = self._end(first)
            last = max(first + 1, bisect_right(self._ends, base + room, first))
            batches.append(range(first, last))
            offsets.append(0)
            offsets += [end - base for end in self._ends[first : last - 1]]
            first = last
        self.tiles[:, _STAGED] = offsets
        self.tiles[:, _STAGED] *= self.dtype.itemsize
        return batches

    def _end(self, count: int) -> int:
        """Return the elements of the first ``count`` moves."""
        return self._ends[count - 1] if count else 0


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


def device_slice(view: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return a piece's region of a view, ``[blocks, planes, heads, slots, HS]``."""
    return view[
        piece.block : piece.block + piece.blocks,
        piece.plane : piece.plane + piece.planes,
        piece.head : piece.head + piece.heads,
        piece.slot : piece.slot + piece.slots,
    ]


def chunk_slice(view: torch.Tensor, piece: Piece, layer: int) -> torch.Tensor:
    """Return a piece's window of a chunk view, axes as :func:`device_slice` has."""
    window = view[
        piece.plane : piece.plane + piece.planes,
        layer,
        piece.token : piece.token + piece.blocks * piece.slots,
        piece.head : piece.head + piece.heads,
    ]
    return window.unflatten(1, (piece.blocks, piece.slots)).permute(1, 0, 3, 2, 4)
