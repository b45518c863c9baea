# SPDX-License-Identifier: Apache-2.0
"""The pieces of a transfer in all layers, as tables and in batches. No byte moves here.

Python lists them in bulk, as what it takes for each would cost as much as copying it.
"""

# Future
from __future__ import annotations

# Standard
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, groupby
from operator import itemgetter
from typing import NamedTuple

# Third Party
import numpy as np

# First Party
from lmcache.v1.platform.devices.rbln.kv_layout import KVGeometry
from lmcache.v1.platform.devices.rbln.kv_plan import Piece
from lmcache.v1.platform.devices.rbln.native import TILE_COLUMNS

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
