# SPDX-License-Identifier: Apache-2.0
"""The pieces of a transfer in all layers: in order, and packed without gaps."""

# Future
from __future__ import annotations

# Third Party
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_reference import LAYOUTS, Case, Layout
import pytest
import torch

# First Party
from lmcache.v1.platform.devices.rbln.kv_layout import resolve_geometry
from lmcache.v1.platform.devices.rbln.kv_moves import Moves
from lmcache.v1.platform.devices.rbln.kv_plan import device_slice, plan_pieces
from lmcache.v1.platform.devices.rbln.native import TILE_COLUMNS


def moves_of(case: Case, chunk_blocks: list[list[int]]) -> Moves:
    """Return the moves of whole blocks."""
    layers = [torch.zeros(case.layer_shape, dtype=torch.int64)] * case.num_layers
    geometry = resolve_geometry(layers, case.engine_kv_format)
    tokens = [len(blocks) * case.block_size for blocks in chunk_blocks]
    return Moves(geometry, plan_pieces(geometry, tokens, chunk_blocks, 0, 1 << 30))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moves_repeat_the_pieces_of_a_chunk_in_each_layer(layout: Layout) -> None:
    case = Case(layout, 3, 8)
    moves = moves_of(case, [[0, 2], [4]])
    wanted = [
        (piece, layer)
        for chunk in (0, 1)
        for layer in range(3)
        for piece in moves.pieces
        if piece.chunk == chunk
    ]
    assert moves.layers == [layer for _, layer in wanted]
    assert moves.sizes == [piece.elements(case.head_size) for piece, _ in wanted]
    assert moves.dtype == torch.int64
    assert moves.count == len(wanted)
    assert moves.total_bytes == 8 * sum(moves.sizes)
    assert moves.largest_bytes == 8 * max(moves.sizes)
    for tile, (piece, layer) in zip(moves.tiles.tolist(), wanted, strict=True):
        named = dict(zip(TILE_COLUMNS, tile, strict=True))
        named.pop("staged")
        assert named.pop("layer") == layer
        assert named == {name: getattr(piece, name) for name in named}
    whole = torch.zeros(case.layer_shape, dtype=torch.int64)
    view = resolve_geometry([whole], case.engine_kv_format).block_view(whole)
    assert moves.starts == [
        device_slice(view, piece).storage_offset() for piece, _ in wanted
    ]


@given(
    layout=st.sampled_from(LAYOUTS),
    buffer_bytes=st.integers(1, 4000),
    ids=st.permutations(range(6)),
)
@settings(max_examples=100, deadline=None)
def test_batches_are_packed_without_gaps(
    layout: Layout, buffer_bytes: int, ids: list[int]
) -> None:
    moves = moves_of(Case(layout, 2, 6), [list(ids[i : i + 2]) for i in (0, 2, 4)])
    batches = list(moves.pack(buffer_bytes))
    assert [i for batch in batches for i in batch] == list(moves.all)
    assert sum(moves.elements_of(batch) for batch in batches) * 8 == moves.total_bytes
    for number, batch in enumerate(batches):
        used = moves.elements_of(batch) * 8
        assert used <= buffer_bytes or len(batch) == 1
        if number + 1 < len(batches):
            assert used + moves.sizes[batch.stop] * 8 > buffer_bytes
        offset = 0
        for index in batch:
            assert moves.tiles[index, 0] == offset
            offset += moves.sizes[index] * 8
