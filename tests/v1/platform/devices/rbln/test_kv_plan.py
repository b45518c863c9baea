# SPDX-License-Identifier: Apache-2.0
"""The plan of a transfer: every element once, every piece contiguous."""

# Future
from __future__ import annotations

# Third Party
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_reference import LAYOUTS, Case, Layout
import pytest
import torch

# First Party
from lmcache.v1.platform.devices.rbln.kv_layout import KVGeometry, resolve_geometry
from lmcache.v1.platform.devices.rbln.kv_plan import Piece, plan_pieces


def chunk_view(chunk: torch.Tensor, geometry: KVGeometry) -> torch.Tensor:
    """View a chunk as ``[P, L, T, NH, HS]``."""
    if geometry.num_planes == 1:
        chunk = chunk[None]
    return chunk.unflatten(-1, (geometry.num_heads, geometry.head_size))


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


def plan(
    case: Case,
    block_ids: list[int],
    chunk_blocks: int = 100,
    max_elements: int = 1 << 30,
    skip: int = 0,
    partial: int = 0,
) -> tuple[list[Piece], list[torch.Tensor], list[torch.Tensor]]:
    """Return the pieces of a call with its block views and chunk views."""
    count = torch.Size(case.layer_shape).numel()
    layers = [
        torch.arange(count, dtype=torch.int64).view(case.layer_shape)
        for _ in range(case.num_layers)
    ]
    geometry = resolve_geometry(layers, case.engine_kv_format)
    views = [
        layer.as_strided(geometry.view_shape, geometry.strides) for layer in layers
    ]
    chunks = [
        block_ids[start : start + chunk_blocks]
        for start in range(0, len(block_ids), chunk_blocks)
    ]
    tokens = [len(blocks) * case.block_size for blocks in chunks]
    if partial:
        tokens[-1] += partial - case.block_size
    pieces = list(plan_pieces(geometry, tokens, chunks, skip, max_elements))
    chunk_views = [
        chunk_view(torch.zeros(case.chunk_shape(t), dtype=torch.int64), geometry)
        for t in tokens
    ]
    return pieces, views, chunk_views


@given(
    layout=st.sampled_from(LAYOUTS),
    sizes=st.tuples(*[st.integers(1, 5)] * 4),
    chunk_blocks=st.integers(1, 4),
    room=st.integers(0, 400),
    skip=st.integers(0, 6),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_pieces_cover_every_element_once(
    layout: Layout,
    sizes: tuple[int, int, int, int],
    chunk_blocks: int,
    room: int,
    skip: int,
    data: st.DataObject,
) -> None:
    blocks, heads, slots, size = sizes
    case = Case(layout, 2, blocks, heads, slots, size)
    ids = data.draw(st.permutations(range(blocks)))
    partial = data.draw(st.integers(0, slots - 1))
    limit = size + room
    pieces, views, chunks = plan(case, ids, chunk_blocks, limit, skip, partial)
    for piece in pieces:
        for layer, view in enumerate(views):
            region = device_slice(view, piece)
            assert region.is_contiguous()
            assert region.numel() == piece.elements(size) <= limit
            window = chunk_slice(chunks[piece.chunk], piece, layer)
            assert window.shape == region.shape
            window.add_(1)
    tokens = sum(chunk.shape[2] for chunk in chunks)
    moved = max(0, tokens - skip * slots) * case.planes * 2 * case.heads * size
    assert sum(int(chunk.sum()) for chunk in chunks) == moved
    assert all(int(chunk.max()) <= 1 for chunk in chunks)


def test_blocks_first_takes_k_and_v_of_a_block_at_once() -> None:
    pieces, _, _ = plan(Case("blocks_first", 1, 8), [5, 2, 7])
    assert [(p.block, p.blocks, p.planes) for p in pieces] == [
        (5, 1, 2), (2, 1, 2), (7, 1, 2),
    ]  # fmt: skip


def test_kv_first_takes_two_pieces_a_block() -> None:
    pieces, _, _ = plan(Case("kv_first", 1, 8), [5, 2])
    assert [(p.block, p.plane, p.planes) for p in pieces] == [
        (5, 0, 1), (5, 1, 1), (2, 0, 1), (2, 1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_of_adjacent_blocks_are_one_piece(layout: Layout) -> None:
    pieces, _, _ = plan(Case(layout, 1, 12), [3, 4, 5, 1, 2, 9])
    per_plane = [(p.block, p.blocks) for p in pieces if p.plane == 0]
    assert per_plane == [(3, 3), (1, 2), (9, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_end_at_chunks_and_at_the_limit(layout: Layout) -> None:
    case = Case(layout, 1, 12)
    block = 64 * case.heads // 2 if layout != "mla" else 32
    planes = 2 if layout == "blocks_first" else 1
    ids = list(range(8))
    pieces, _, _ = plan(case, ids, 4, max_elements=3 * planes * block)
    runs = [(p.chunk, p.block, p.blocks) for p in pieces if p.plane == 0]
    assert runs == [(0, 0, 3), (0, 3, 1), (1, 4, 3), (1, 7, 1)]
