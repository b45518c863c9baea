# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter against an independent reference, byte by byte."""

# Standard
from concurrent.futures import ThreadPoolExecutor
from typing import Any
import random
import threading

# Third Party
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_reference import (
    DTYPES,
    LAYOUTS,
    Case,
    Layout,
    as_bytes,
    assert_same_bytes,
    check_both_directions,
    check_inference_mode,
    move,
    random_bits,
    transfer,
    unique_values,
    upload,
)
import pytest
import torch

# First Party
from lmcache.v1.platform.devices.rbln import staging


@st.composite
def transfers(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a KV cache and a call on it."""
    case = Case(
        layout=draw(st.sampled_from(LAYOUTS)),
        num_layers=draw(st.integers(1, 3)),
        num_blocks=draw(st.integers(1, 24)),
        num_heads=draw(st.integers(1, 4)),
        block_size=draw(st.integers(1, 6)),
        head_size=draw(st.integers(1, 9)),
        dtype=draw(st.sampled_from(DTYPES)),
    )
    order = draw(st.permutations(range(case.num_blocks)))
    block_ids = order[: draw(st.integers(1, case.num_blocks))]
    return {
        "case": case,
        "block_ids": list(block_ids),
        "blocks_per_chunk": draw(st.integers(1, 8)),
        "partial_tokens": draw(st.integers(0, case.block_size)),
        "skip_blocks": draw(st.integers(0, len(block_ids) + 1)),
        "seed": draw(st.integers(0, 1 << 20)),
    }


@given(call=transfers())
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
    ],
)
def test_any_transfer_equals_the_reference(device: str, call: dict[str, Any]) -> None:
    check_both_directions(device=device, **call)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(device: str, layout: Layout, dtype: torch.dtype) -> None:
    case = Case(layout, num_blocks=6, block_size=16, head_size=32, dtype=dtype)
    check_both_directions(case, device, [4, 1, 2, 0], blocks_per_chunk=2, seed=11)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_of_one_and_two(device: str, layout: Layout) -> None:
    for bits in range(16):
        blocks, heads, slots, size = (1 + (bits >> axis & 1) for axis in range(4))
        case = Case(layout, 2, blocks, heads, slots, size, torch.int8)
        check_both_directions(
            case, device, list(range(blocks))[::-1], blocks_per_chunk=1, seed=bits
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("blocks_per_chunk", range(1, 9))
def test_every_prefix_skip(device: str, layout: Layout, blocks_per_chunk: int) -> None:
    case = Case(layout, num_layers=1, num_blocks=9, block_size=2, head_size=4)
    block_ids = [7, 8, 0, 3, 4, 5, 1, 2]
    for skip in range(len(block_ids) + 2):
        check_both_directions(
            case, device, block_ids, blocks_per_chunk, skip_blocks=skip, seed=skip
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled"])
def test_a_thousand_blocks(device: str, layout: Layout, order: str) -> None:
    case = Case(layout, 1, 1000, 2, 2, 2, torch.float16)
    block_ids = list(range(1000))
    if order == "descending":
        block_ids.reverse()
    if order == "shuffled":
        random.Random(3).shuffle(block_ids)
    check_both_directions(case, device, block_ids, blocks_per_chunk=8, seed=5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_value_lands_in_its_place(device: str, layout: Layout) -> None:
    """No two elements are equal, so no permutation can pass."""
    case = Case(layout, 3, 7, 3, 4, 8, torch.float32)
    count = torch.Size(case.layer_shape).numel()
    layers = [unique_values(case.layer_shape, count * i) for i in range(3)]
    block_ids = [6, 2, 3, 0]
    wanted = [torch.zeros(case.chunk_shape(8)) for _ in range(2)]
    move(case, True, layers, wanted, block_ids, 8)
    chunks = [torch.zeros_like(chunk) for chunk in wanted]
    transfer(case, True, [upload(t, device) for t in layers], chunks, block_ids, 8)
    assert_same_bytes(chunks, wanted)
    restored = [upload(torch.zeros(case.layer_shape), device) for _ in layers]
    transfer(case, False, restored, chunks, block_ids, 8)
    wanted_layers = [torch.zeros(case.layer_shape) for _ in layers]
    move(case, False, wanted_layers, wanted, block_ids, 8)
    assert_same_bytes(restored, wanted_layers)


@pytest.mark.deferred
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("buffer_bytes", [64, 256, 1000])
def test_head_blocks_larger_than_a_staging_buffer(
    device: str, layout: Layout, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces are split by plane, heads and tokens, down to a few tokens."""
    monkeypatch.setattr(staging, "BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(staging, "_process_arena", staging.StagingArena(4, 2))
    case = Case(layout, 2, 6, 3, 8, 16, torch.float16)
    check_both_directions(
        case, device, [5, 0, 1, 2, 4], 2, partial_tokens=3, skip_blocks=1
    )


@pytest.mark.deferred
@pytest.mark.npu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_chunk_of_many_staging_buffers(layout: Layout) -> None:
    """More data than the ring holds: buffers are reused while copies are in flight."""
    case = Case(layout, 6, 4, 8, 512, 128, torch.bfloat16)
    layers = [random_bits(case.layer_shape, case.dtype, i) for i in range(6)]
    chunk = torch.empty(case.chunk_shape(1536), dtype=case.dtype)
    device_layers = [upload(layer, "rbln:0") for layer in layers]
    transfer(case, True, device_layers, [chunk], [3, 0, 1], 1536)
    for plane in range(case.planes):
        for index, layer in enumerate(layers):
            if layout == "mla":
                per_plane = layer.unsqueeze(1)
            else:
                axis = 1 if layout == "blocks_first" else 0
                per_plane = layer.select(axis, plane).squeeze(2)
            rows = per_plane[[3, 0, 1]].transpose(1, 2).reshape(1536, -1)
            got = chunk[index] if layout == "mla" else chunk[plane, index]
            assert torch.equal(as_bytes(got), as_bytes(rows))
    restored = [upload(torch.zeros_like(layer), "rbln:0") for layer in layers]
    transfer(case, False, restored, [chunk], [3, 0, 1], 1536)
    blocks = {"blocks_first": 0, "kv_first": 1, "mla": 0}[layout]
    for got, layer in zip(restored, layers, strict=True):
        wanted = layer.clone()
        wanted.select(blocks, 2).zero_()
        assert torch.equal(as_bytes(got), as_bytes(wanted))


@pytest.mark.deferred
@pytest.mark.parametrize("layout", ["blocks_first", "mla"])
def test_storage_offset_and_padded_block_stride(device: str, layout: Layout) -> None:
    case = Case(layout, 1, 5, 2, 4, 8, torch.float16)
    tight = torch.Size(case.layer_shape[1:]).numel()
    base = random_bits((7 + 5 * (tight + 24),), case.dtype, 1)

    def padded(storage: torch.Tensor) -> torch.Tensor:
        strides = torch.empty(case.layer_shape).stride()
        return storage.as_strided(case.layer_shape, (tight + 24, *strides[1:]), 7)

    wanted_base, got_base = base.clone(), upload(base, device)
    wanted = [random_bits(case.chunk_shape(8), case.dtype, 2)]
    got = [wanted[0].clone()]
    for to_chunks in (True, False):
        move(case, to_chunks, [padded(wanted_base)], wanted, [4, 1], 8)
        transfer(case, to_chunks, [padded(got_base)], got, [4, 1], 8)
        assert_same_bytes(got, wanted)
        # The whole storage: padding and the bytes before the offset stay too.
        assert_same_bytes([got_base], [wanted_base])
        wanted[0].copy_(random_bits(case.chunk_shape(8), case.dtype, 3))
        got[0].copy_(wanted[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_that_are_windows_of_a_larger_buffer(
    device: str, layout: Layout
) -> None:
    case = Case(layout, 2, 4, 2, 4, 8)
    layers = [random_bits(case.layer_shape, case.dtype, i) for i in range(2)]
    pool = random_bits(case.chunk_shape(20), case.dtype, 9)
    wanted_pool = pool.clone()
    move(case, True, layers, [wanted_pool[..., 6:14, :]], [3, 1], 8)
    window = pool[..., 6:14, :]
    transfer(case, True, [upload(t, device) for t in layers], [window], [3, 1], 8)
    assert_same_bytes([pool], [wanted_pool])


@pytest.mark.deferred
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inference_mode_tensors_from_a_plain_thread(
    monkeypatch: pytest.MonkeyPatch, device: str, layout: Layout
) -> None:
    # Staging that the first transfer makes inside of inference mode, too.
    monkeypatch.setattr(staging, "_process_arena", None)
    check_inference_mode(Case(layout), device)


@pytest.mark.deferred
@pytest.mark.npu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_transfers_on_two_devices(layout: Layout) -> None:
    if torch.rbln.device_count() < 2:
        pytest.skip("needs two NPUs")
    case = Case(layout)
    check_both_directions(case, "rbln:1", [3, 0, 1, 4], 2, seed=1)
    check_both_directions(case, "rbln:0", [3, 0, 1, 4], 2, seed=2)


@pytest.mark.npu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bound_cache_is_never_served_from_the_host(layout: Layout) -> None:
    case = Case(layout)
    layers = [
        upload(random_bits(case.layer_shape, case.dtype, i), "rbln:0") for i in range(2)
    ]
    chunk = torch.empty(case.chunk_shape(8), dtype=case.dtype)
    transfer(case, True, layers, [chunk], [0, 1], 8)
    torch.rbln.synchronize()
    with torch.rbln.explain() as region:
        transfer(case, True, layers, [chunk], [4, 1], 8)
        transfer(case, False, layers, [chunk], [0, 2], 8)
    assert region.verdict()["clean"], region.report()


@pytest.mark.deferred
@pytest.mark.npu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_eight_threads_each_on_its_own_stream(layout: Layout) -> None:
    """All threads share one cache; each owns the blocks that it writes."""
    case = Case(layout, 2, 33, 4, 64, 64, torch.float16)
    threads, rounds = 8, 3
    initial = [random_bits(case.layer_shape, case.dtype, i) for i in range(2)]
    layers = [upload(layer, "rbln:0") for layer in initial]
    wanted = [layer.clone() for layer in initial]
    start = threading.Barrier(threads)

    def work(thread: int) -> None:
        mine = [4 * thread + offset for offset in (2, 0, 3, 1)]
        start.wait()
        with torch.rbln.stream(torch.rbln.Stream("rbln:0")):
            for turn in range(rounds):
                stored = random_bits(
                    case.chunk_shape(256), case.dtype, turn * 64 + thread
                )
                transfer(case, False, layers, [stored], mine, 256)
                loaded = torch.empty_like(stored)
                transfer(case, True, layers, [loaded], mine, 256)
                assert torch.equal(as_bytes(loaded), as_bytes(stored))

    with ThreadPoolExecutor(threads) as executor:
        for result in [executor.submit(work, i) for i in range(threads)]:
            result.result()
    for thread in range(threads):
        mine = [4 * thread + offset for offset in (2, 0, 3, 1)]
        last = random_bits(
            case.chunk_shape(256), case.dtype, (rounds - 1) * 64 + thread
        )
        move(case, False, wanted, [last], mine, 256)
    assert_same_bytes(layers, wanted)
