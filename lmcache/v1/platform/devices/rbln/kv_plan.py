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
from functools import cached_property
from itertools import accumulate, groupby
from operator import itemgetter
from typing import NamedTuple

# Third Party
import numpy as np
import torch

# First Party
from lmcache.v1.platform.devices.rbln.kv_layout import KVGeometry
from lmcache.v1.platform.devices.rbln.native import TILE_COLUMNS


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


_PIECE_COLUMN = {name: index for index, name in enumerate(Piece._fields)}
#: Where each column of a tile comes from; "staged" and "layer" are in no piece.
_FROM_PIECE = [_PIECE_COLUMN.get(name, 0) for name in TILE_COLUMNS]
_STAGED, _LAYER = TILE_COLUMNS.index("staged"), TILE_COLUMNS.index("layer")
_NO_TILES = np.empty((0, len(TILE_COLUMNS)), dtype=np.int64)
_tile_of = itemgetter(*_FROM_PIECE)


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


class _Table(NamedTuple):
    """All moves, one after the other; columns are described in :class:`Moves`."""

    layers: list[int]
    starts: list[int]
    sizes: list[int]
    ends: list[int]
    tiles: np.ndarray


class Moves:
    """The pieces of a transfer in each layer: chunk by chunk, then layer by layer.

    They are listed when first asked for; ``lmcache.kv_transpose`` does it by itself.

    Args:
        geometry: Geometry of the KV cache.
        pieces: What to copy in every layer, ordered by chunk.

    Attributes:
        pieces: As above.
        count: How many moves there are.
        total_bytes: Bytes of all moves.
        largest_bytes: Bytes of the largest one.
        dtype: Element type of the cache.
    """

    def __init__(self, geometry: KVGeometry, pieces: Iterable[Piece]) -> None:
        self.pieces = list(pieces)
        self.dtype = geometry.dtype
        self.count = len(self.pieces) * geometry.num_layers
        self._geometry = geometry
        self._sizes = [piece.elements(geometry.head_size) for piece in self.pieces]
        itemsize = self.dtype.itemsize
        self.total_bytes = sum(self._sizes) * geometry.num_layers * itemsize
        self.largest_bytes = max(self._sizes, default=0) * itemsize

    @cached_property
    def _table(self) -> _Table:
        # A transfer waits for this, so it is lists that repeat, not many small arrays.
        count = self._geometry.num_layers
        layers: list[int] = []
        starts: list[int] = []
        sizes: list[int] = []
        tables: list[np.ndarray] = []
        for _, group in groupby(
            zip(self.pieces, self._sizes, strict=True), key=lambda pair: pair[0].chunk
        ):
            in_chunk, their_sizes = zip(*group, strict=True)
            layers += [layer for layer in range(count) for _ in in_chunk]
            starts += _starts(self._geometry, in_chunk) * count
            sizes += their_sizes * count
            tables += [np.array([_tile_of(piece) for piece in in_chunk], np.int64)] * (
                count
            )
        tiles = np.concatenate(tables) if tables else _NO_TILES.copy()
        tiles[:, _LAYER] = layers
        return _Table(layers, starts, sizes, list(accumulate(sizes)), tiles)

    @property
    def layers(self) -> list[int]:
        """Layer of each move."""
        return self._table.layers

    @property
    def starts(self) -> list[int]:
        """Where its device region starts, in elements from the view's first."""
        return self._table.starts

    @property
    def sizes(self) -> list[int]:
        """Its elements."""
        return self._table.sizes

    @property
    def tiles(self) -> np.ndarray:
        """The windows of chunks, int64 ``[n, 10]``; columns are ``TILE_COLUMNS``.

        ``staged`` is set by :meth:`pack`.
        """
        return self._table.tiles

    @property
    def _ends(self) -> list[int]:
        """The elements up to the end of each move."""
        return self._table.ends

    @property
    def all(self) -> range:
        """Indices of all moves."""
        return range(self.count)

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
