# SPDX-License-Identifier: Apache-2.0
"""``lmcache.kv_transpose.transfer``: a whole transfer in one native call."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
import gc

# Third Party
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_reference import (
    LAYOUTS,
    Case,
    Layout,
    assert_same_bytes,
    move,
    random_bits,
)
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# First Party
from lmcache import kv_transpose
from lmcache.v1.platform.devices.rbln.kv_layout import (
    KVGeometry,
    resolve_geometry,
)
from lmcache.v1.platform.devices.rbln.kv_plan import Piece, plan_pieces

DTYPES = (torch.uint8, torch.float16, torch.float32, torch.float64)


def arguments_of(
    case: Case,
    geometry: KVGeometry,
    layers: list[torch.Tensor],
    chunks: list[torch.Tensor],
    pieces: list[Piece],
    staging: list[torch.Tensor],
    part_bytes: int,
    parts: int,
) -> dict[str, Any]:
    """Return the arguments of a synchronous transfer but its direction."""
    return {
        "layers": layers,
        "strides": geometry.strides[:-1],
        "heads": geometry.num_heads,
        "staging": staging,
        "part_bytes": part_bytes,
        "parts": parts,
        "collector": None,
        "batch_bytes": part_bytes,
        "chunks": chunks,
        "pieces": np.array(pieces, dtype=np.int64).reshape(-1, len(Piece._fields)),
    }


def windowed(chunk: torch.Tensor, gap: int, start: int) -> torch.Tensor:
    """Return a chunk as a window of a larger buffer, of any alignment.

    Args:
        chunk: The chunk.
        gap: Elements between tokens, layers and planes.
        start: Elements before the first one.
    """
    strides = [1]
    for size in reversed(chunk.shape[1:]):
        strides.insert(0, strides[0] * size + gap)
    memory = torch.zeros(start + chunk.shape[0] * strides[0], dtype=chunk.dtype)
    window = memory.as_strided(chunk.shape, strides, start)
    window.copy_(chunk)
    return window


@given(
    layout=st.sampled_from(LAYOUTS),
    sizes=st.tuples(*[st.integers(1, 5)] * 3, st.sampled_from([1, 2, 3, 5, 8, 16])),
    dtype=st.sampled_from(DTYPES),
    chunk_blocks=st.integers(1, 3),
    skip=st.integers(0, 4),
    buffers=st.integers(1, 2),
    parts=st.integers(1, 3),
    room=st.integers(0, 100),
    batch=st.integers(1, 200),
    threads=st.integers(1, 3),
    to_host=st.booleans(),
    collects=st.booleans(),
    gap=st.sampled_from([0, 1, 8, 16]),
    start=st.sampled_from([0, 1, 8]),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_moves_what_plain_indexing_does(
    layout: Layout,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    chunk_blocks: int,
    skip: int,
    buffers: int,
    parts: int,
    room: int,
    batch: int,
    threads: int,
    to_host: bool,
    collects: bool,
    gap: int,
    start: int,
    data: st.DataObject,
) -> None:
    blocks, heads, slots, size = sizes
    case = Case(layout, 3, blocks, heads, slots, size, dtype)
    ids = data.draw(st.permutations(range(blocks)))
    last = data.draw(st.integers(0, slots - 1))
    chunk_tokens = chunk_blocks * slots
    tokens = [chunk_tokens] * (blocks // chunk_blocks)
    tokens += [blocks % chunk_blocks * slots] if blocks % chunk_blocks else []
    tokens[-1] -= last
    # Layers with memory of others around them, in one storage.
    count = torch.Size(case.layer_shape).numel()
    memory = random_bits((3 * (count + 3) + 1,), dtype, 1)
    wanted_memory = memory.clone()

    def layers_in(buffer: torch.Tensor) -> list[torch.Tensor]:
        return [
            buffer[1 + i * (count + 3) :][:count].view(case.layer_shape)
            for i in range(3)
        ]

    layers = layers_in(memory)
    chunks = [
        windowed(random_bits(case.chunk_shape(t), dtype, 2 + i), gap, start)
        for i, t in enumerate(tokens)
    ]
    wanted = [chunk.clone() for chunk in chunks]
    move(case, to_host, layers_in(wanted_memory), wanted, ids, chunk_tokens, skip)

    geometry = resolve_geometry(layers, case.engine_kv_format)
    ids_of_chunks = [ids[i : i + chunk_blocks] for i in range(0, blocks, chunk_blocks)]
    elements = size + room
    pieces = list(plan_pieces(geometry, tokens, ids_of_chunks, skip, elements))
    part_bytes = elements * dtype.itemsize
    # A buffer may be larger than its parts, and begin anywhere.
    staging = [
        torch.zeros(parts * elements + 2, dtype=dtype)[1:].view(torch.uint8)
        for _ in range(buffers)
    ]
    arguments = arguments_of(
        case, geometry, layers, chunks, pieces, staging, part_bytes, parts
    )
    arguments["batch_bytes"] = batch * dtype.itemsize
    if collects:
        arguments["collector"] = torch.zeros(elements + 1, dtype=dtype)[1:]
    kv_transpose.transfer(to_host, **arguments, threads=threads)

    assert_same_bytes([memory, *chunks], [wanted_memory, *wanted])


CASE = Case("blocks_first", 2, 4, 2, 4, 8, torch.float16)
PART = 128
COLLECTOR = torch.zeros(PART, dtype=CASE.dtype)


@pytest.fixture
def good() -> dict[str, Any]:
    """The arguments of a transfer of blocks 2 and 0, in two pieces."""
    layers = [torch.zeros(CASE.layer_shape, dtype=CASE.dtype) for _ in range(2)]
    geometry = resolve_geometry(layers, CASE.engine_kv_format)
    chunk = torch.zeros(CASE.chunk_shape(8), dtype=CASE.dtype)
    pieces = list(plan_pieces(geometry, [8], [[2, 0]], 0, PART))
    staging = [torch.zeros(4 * PART, dtype=torch.uint8)]
    return arguments_of(CASE, geometry, layers, [chunk], pieces, staging, 2 * PART, 2)


def of_piece(**change: int) -> Any:
    """Return a change of the last piece."""

    def changed(arguments: dict[str, Any]) -> dict[str, Any]:
        table = arguments["pieces"].copy()
        for name, value in change.items():
            table[-1, Piece._fields.index(name)] = value
        return {"pieces": table}

    return changed


def without_memory(like: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose storage was freed."""
    tensor = torch.empty(like.shape, dtype=like.dtype)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (of_piece(block=4), r"region 1 \(start 512, size 128\) inside of the 512"),
        (of_piece(block=-1), "region 1 "),
        (of_piece(block=1 << 62), "region 1 "),
        (of_piece(blocks=2), "tile 1 .* staging buffer of 256 bytes"),
        (of_piece(blocks=0), "tile 1 "),
        (of_piece(plane=1), "tile 1 .* 1 chunks"),
        (of_piece(head=1), "tile 1 .* 1 chunks"),
        (of_piece(token=5), "tile 1 .* 1 chunks"),
        (of_piece(token=-1), "tile 1 .* 1 chunks"),
        (of_piece(chunk=1), "does not lie in one of the 1 chunks"),
        (of_piece(slots=1 << 61), "tile 1 "),
        (lambda old: {"pieces": old["pieces"][:, :9]}, r"of shape \[n, 10\]|dense"),
        (lambda old: {"pieces": old["pieces"].astype(np.int32)}, "int64"),
        (lambda old: {"pieces": old["pieces"].tolist()}, "int64"),
        (lambda _: {"layers": []}, "at least one layer"),
        (lambda old: {"layers": old["layers"][:1] * 3}, "tile "),
        (
            lambda old: {"layers": [old["layers"][0].float()] * 2},
            "chunks of the layers'",
        ),
        (
            lambda old: {"layers": [old["layers"][0], old["layers"][1].bfloat16()]},
            "layers of one element type",
        ),
        (lambda _: {"staging": []}, "parts of staging"),
        (lambda _: {"parts": 0}, "at least one part of whole elements"),
        (lambda _: {"part_bytes": 0}, "at least one part of whole elements"),
        (lambda _: {"part_bytes": 255}, "at least one part of whole elements"),
        (lambda _: {"parts": 3}, "room for its parts"),
        (lambda _: {"parts": 1 << 62}, "room for its parts"),
        (lambda _: {"part_bytes": 254}, "tile 0 .* staging buffer of 254 bytes"),
        (lambda old: {"staging": [old["staging"][0].view(torch.int8)]}, "uint8"),
        (lambda old: {"staging": [old["staging"][0].repeat(2)[::2]]}, "one dense axis"),
        (lambda old: {"staging": [old["staging"][0].view(-1, 1)]}, "one dense axis"),
        (lambda old: {"staging": [old["staging"][0].to("meta")]}, "host memory"),
        (lambda old: {"staging": [old["staging"][0].repeat(2)[1:]]}, "to elements"),
        (lambda _: {"collector": COLLECTOR.float()}, "a collector of"),
        (lambda _: {"collector": COLLECTOR[1:]}, "at least 256 bytes"),
        (lambda _: {"collector": COLLECTOR.view(2, -1)}, "one dense axis"),
        (lambda _: {"collector": COLLECTOR.to("meta")}, "and device"),
        (lambda _: {"batch_bytes": 0}, "batch_bytes of at least 1"),
        (lambda _: {"chunks": []}, "one chunk"),
        (lambda old: {"chunks": [old["chunks"][0][0, 0, 0, 0]]}, "or without planes"),
        (lambda old: {"chunks": [old["chunks"][0][..., :0]]}, "tile 0 "),
        (
            lambda old: {"chunks": [without_memory(old["chunks"][0])]},
            "1024 bytes, got 0",
        ),
        (lambda old: {"staging": [without_memory(old["staging"][0])]}, "the memory"),
        (lambda old: {"chunks": [c[0] for c in old["chunks"]]}, "tile 0 .* chunks"),
        (lambda old: {"chunks": [c[0, 0] for c in old["chunks"]]}, "chunks"),
        (lambda old: {"chunks": [c[None] for c in old["chunks"]]}, "or without planes"),
        (lambda old: {"chunks": [old["chunks"][0], old["chunks"][0][0]]}, "same axes"),
        (lambda old: {"chunks": [old["chunks"][0].float()]}, "element type"),
        (lambda old: {"chunks": [old["chunks"][0].mT.contiguous().mT]}, "dense tokens"),
        (lambda _: {"heads": 0}, "whole heads"),
        (lambda _: {"heads": 3}, "whole heads"),
        (
            lambda old: {"chunks": [old["chunks"][0], old["chunks"][0][..., :4]]},
            "of the same axes and heads",
        ),
        (lambda _: {"threads": 0}, "threads of 1 to 64, got 0"),
        (lambda _: {"threads": 65}, "threads of 1 to 64, got 65"),
        (lambda _: {"threads": 2**31 - 1}, "threads of 1 to 64"),
        (lambda _: {"in_place": True}, "one plane, one head"),
    ],
)
@pytest.mark.parametrize("to_host", [True, False])
def test_refuses_before_the_first_byte_moves(
    good: dict[str, Any], change: Any, says: str, to_host: bool
) -> None:
    sources = good["layers"] if to_host else good["chunks"]
    targets = good["chunks"] if to_host else good["layers"]
    for source in sources:
        source.fill_(1)
    with pytest.raises(ValueError, match=says):
        kv_transpose.transfer(to_host, **(good | change(good)))
    assert not any(bool(target.any()) for target in targets)
    kv_transpose.transfer(to_host, **good)
    assert any(bool(target.any()) for target in targets)


def test_nothing_to_move_is_no_error(good: dict[str, Any]) -> None:
    good["pieces"] = good["pieces"][:0]
    kv_transpose.transfer(True, **good)
    kv_transpose.transfer(False, **good)


class Meanwhile(TorchDispatchMode):
    """Does something else, once, when the transfer issues its first copy."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__()
        self.actions = [action]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._foreach_copy_.default and self.actions:
            self.actions.pop()()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("to_host", [True, False])
def test_what_others_do_to_the_arguments_meanwhile_has_no_effect(
    good: dict[str, Any], to_host: bool
) -> None:
    sources = good["layers"] if to_host else good["chunks"]
    targets = list(good["chunks"] if to_host else good["layers"])
    for index, source in enumerate(sources):
        source.copy_(random_bits(tuple(source.shape), source.dtype, index))
    # A batch for each piece, so that copies follow.
    good |= {"batch_bytes": 1, "pieces": good["pieces"].copy()}
    expected = {
        name: [tensor.clone() for tensor in good[name]] for name in ("layers", "chunks")
    }
    kv_transpose.transfer(to_host, **(good | expected))

    def spoil() -> None:
        good["pieces"].fill(1 << 40)
        good["pieces"].resize((0, 10), refcheck=False)
        for name in ("chunks", "layers", "staging"):
            good[name].clear()
        gc.collect()

    meanwhile = Meanwhile(spoil)
    with meanwhile:
        kv_transpose.transfer(to_host, **good)
    assert not meanwhile.actions
    assert good["chunks"] == []
    assert_same_bytes(targets, expected["chunks" if to_host else "layers"])


def test_sequences_that_make_their_items_on_the_fly(good: dict[str, Any]) -> None:
    class Fresh(Sequence[torch.Tensor]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: Any) -> Any:
            if index > 1:
                raise IndexError
            return torch.ones(CASE.layer_shape, dtype=CASE.dtype)

    kv_transpose.transfer(True, **(good | {"layers": Fresh()}))
    assert bool((good["chunks"][0] == 1).all())


def test_threads_share_the_helpers(good: dict[str, Any]) -> None:
    layers = [random_bits(CASE.layer_shape, CASE.dtype, i) for i in range(2)]
    wanted = [torch.zeros(CASE.chunk_shape(8), dtype=CASE.dtype)]
    move(CASE, True, layers, wanted, [2, 0], 8)

    def work() -> None:
        chunk = torch.zeros(CASE.chunk_shape(8), dtype=CASE.dtype)
        mine = good | {"layers": layers, "chunks": [chunk], "threads": 3}
        mine["staging"] = [torch.zeros(4 * PART, dtype=torch.uint8)]
        for _ in range(200):
            chunk.zero_()
            kv_transpose.transfer(True, **mine)
            assert_same_bytes([chunk], wanted)

    with ThreadPoolExecutor(4) as executor:
        for result in [executor.submit(work) for _ in range(4)]:
            result.result()


@given(
    tokens=st.integers(1, 8),
    size=st.integers(1, 9),
    gap=st.integers(0, 3),
    to_host=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_copies_in_place(tokens: int, size: int, gap: int, to_host: bool) -> None:
    case = Case("mla", 3, 4, 1, 2, size, torch.float16)
    layers = [random_bits(case.layer_shape, case.dtype, i) for i in range(3)]
    ids = [3, 0, 1, 2][: -(-tokens // 2)]
    memory = random_bits((3, 8 + gap, size), case.dtype, 7)
    chunk = memory[:, gap : gap + tokens]
    wanted_layers = [layer.clone() for layer in layers]
    wanted_memory = memory.clone()
    wanted = wanted_memory[:, gap : gap + tokens]
    move(case, to_host, wanted_layers, [wanted], ids, 8)
    geometry = resolve_geometry(layers, case.engine_kv_format)
    pieces = list(plan_pieces(geometry, [tokens], [ids], 0, 1 << 20))
    arguments = arguments_of(case, geometry, layers, [chunk], pieces, [], 2, 1)
    kv_transpose.transfer(to_host, **arguments, in_place=True)
    assert_same_bytes([memory, *layers], [wanted_memory, *wanted_layers])
