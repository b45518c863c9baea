# SPDX-License-Identifier: Apache-2.0
"""``lmcache.kv_transpose``: plans, and whole transfers in one native call."""

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
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# First Party
from lmcache import kv_transpose
from lmcache.v1.platform.devices.rbln.kv_layout import layer_traits, resolve_geometry
from lmcache.v1.platform.devices.rbln.lanes import make_probe

DTYPES = (torch.uint8, torch.float16, torch.float32, torch.float64)


def arguments_of(
    case: Case,
    layers: list[torch.Tensor],
    chunks: list[torch.Tensor],
    ids: Sequence[int],
    chunk_tokens: int,
    skip: int = 0,
    max_bytes: int = 1 << 30,
) -> dict[str, Any]:
    """Return the arguments of a plan but its direction."""
    geometry = resolve_geometry(layer_traits(layers), case.engine_kv_format)
    return {
        "layers": layers,
        "sizes": geometry.sizes,
        "strides": geometry.strides,
        "chunks": chunks,
        "block_ids": list(ids),
        "chunk_tokens": chunk_tokens,
        "skip_blocks": skip,
        "max_bytes": max_bytes,
    }


def run(plan: Any, staging: list[torch.Tensor], **more: Any) -> None:
    """Run a plan synchronously."""
    kv_transpose.run(
        plan,
        **({"staging": staging, "collector": None, "stream": None, "probe": None})
        | more,
    )


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

    elements = size + room
    width = dtype.itemsize
    # A buffer may begin anywhere.
    staging = [
        torch.zeros(parts * elements + 1, dtype=dtype)[1:].view(torch.uint8)
        for _ in range(buffers)
    ]
    plan = kv_transpose.plan_host(
        to_host,
        **arguments_of(case, layers, chunks, ids, chunk_tokens, skip, elements * width),
    )
    moved = max(0, sum(tokens) - skip * slots) * case.planes * 3 * case.heads * size
    assert plan.bytes == moved * width
    assert plan.largest_bytes <= elements * width
    collector = torch.zeros(parts * elements, dtype=dtype) if collects else None
    run(
        plan,
        staging,
        collector=collector,
        threads=threads,
        part_bytes=elements * width,
        batch_bytes=batch * width,
    )

    assert_same_bytes([memory, *chunks], [wanted_memory, *wanted])


CASE = Case("blocks_first", 2, 4, 2, 4, 8, torch.float16)
STAGING = 256
COLLECTOR = torch.zeros(STAGING // 2, dtype=CASE.dtype)


@pytest.fixture
def good() -> dict[str, Any]:
    """The arguments of a plan of blocks 2 and 0."""
    layers = [torch.zeros(CASE.layer_shape, dtype=CASE.dtype) for _ in range(2)]
    chunk = torch.zeros(CASE.chunk_shape(8), dtype=CASE.dtype)
    return arguments_of(CASE, layers, [chunk], [2, 0], 8, max_bytes=STAGING)


def staging_of(size: int = STAGING) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=torch.uint8)]


def without_memory(like: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose storage was freed."""
    tensor = torch.empty(like.shape, dtype=like.dtype)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda _: {"block_ids": [2, 4]}, "block id 4 is outside.*blocks 0 to 3"),
        (lambda _: {"block_ids": [-1, 0]}, "block id -1 "),
        (lambda _: {"block_ids": [2, 1 << 62]}, "block id 4611686018427387904 "),
        (lambda _: {"block_ids": [2]}, "got 1 block ids, wanted 2"),
        (lambda _: {"block_ids": [2, 0, 1]}, "got 3 block ids, wanted 2"),
        (lambda _: {"skip_blocks": -1}, "0 or more to skip"),
        (lambda _: {"chunk_tokens": 0}, "whole blocks"),
        (lambda _: {"chunk_tokens": 6}, "whole blocks"),
        (lambda _: {"chunk_tokens": -8}, "whole blocks"),
        (lambda _: {"chunk_tokens": 4}, "chunk 0 has shape"),
        (lambda _: {"max_bytes": 15}, "head size 8 of torch.float16 does not fit"),
        (lambda _: {"max_bytes": -1}, "does not fit"),
        (lambda _: {"sizes": (5, 2, 2, 4, 8)}, "KV layer 0 has the memory of 512"),
        (lambda _: {"sizes": (0, 2, 2, 4, 8)}, "KV layer 0"),
        (lambda _: {"sizes": (4, 2, 2, 4, -8)}, "KV layer 0"),
        (lambda _: {"sizes": (1 << 62, 2, 2, 4, 8)}, "KV layer 0"),
        (lambda _: {"sizes": (4, 2, 2, 1 << 62, 8)}, "KV layer 0"),
        (lambda _: {"strides": (129, 64)}, "KV layer 0"),
        (lambda _: {"strides": (128, 193)}, "KV layer 0"),
        (lambda _: {"strides": (-128, 64)}, "KV layer 0"),
        (lambda _: {"strides": (1 << 62, 64)}, "KV layer 0"),
        (lambda _: {"layers": []}, "at least one KV layer"),
        (lambda old: {"layers": old["layers"][:1] * 3}, "chunk 0 has shape"),
        (
            lambda old: {"layers": [t[:3] for t in old["layers"]]},
            None,  # its storage holds the fourth block
        ),
        (
            lambda old: {"layers": [without_memory(old["layers"][0])] * 2},
            "KV layer 0 has the memory of 0 elements",
        ),
        (
            lambda old: {"layers": [old["layers"][0].float()] * 2},
            "chunk 0 is torch.float16 but the KV cache is torch.float32",
        ),
        (
            lambda old: {"layers": [old["layers"][0], old["layers"][1].bfloat16()]},
            "must agree",
        ),
        (
            lambda old: {"layers": [old["layers"][0], old["layers"][1].to("meta")]},
            "must agree",
        ),
        (lambda _: {"chunks": []}, "got 2 block ids, wanted 0"),
        (lambda old: {"chunks": [old["chunks"][0][0, 0, 0, 0]]}, "chunk 0 has shape"),
        (lambda old: {"chunks": [old["chunks"][0][..., :0]]}, "chunk 0 has shape"),
        (lambda old: {"chunks": [without_memory(old["chunks"][0])]}, "bytes, got 0"),
        (lambda old: {"chunks": [old["chunks"][0][None]]}, "chunk 0 has shape"),
        (
            lambda old: {"chunks": [old["chunks"][0], old["chunks"][0][0]]},
            "chunk 1 has shape",
        ),
        (lambda old: {"chunks": [old["chunks"][0].float()]}, "chunk 0 is torch.float"),
        (
            lambda old: {"chunks": [old["chunks"][0].mT.contiguous().mT]},
            "the last axis must be dense",
        ),
    ],
)
@pytest.mark.parametrize("to_host", [True, False])
def test_a_plan_refuses_what_would_leave_memory(
    good: dict[str, Any], change: Any, says: str | None, to_host: bool
) -> None:
    if says is None:
        kv_transpose.plan_host(to_host, **(good | change(good)))
        return
    with pytest.raises(ValueError, match=says):
        kv_transpose.plan_host(to_host, **(good | change(good)))


def test_a_block_is_written_once(good: dict[str, Any]) -> None:
    twice = good | {"block_ids": [2, 2]}
    kv_transpose.plan_host(True, **twice)
    with pytest.raises(ValueError, match=r"blocks \[2\] are destinations"):
        kv_transpose.plan_host(False, **twice)
    assert kv_transpose.plan_host(False, **(twice | {"skip_blocks": 1})).segments == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"staging": []}, "staging, unless"),
        ({"staging": staging_of(STAGING - 2)}, "staging of 256 bytes.*got 254"),
        ({"staging": [staging_of()[0].view(torch.int8)]}, "uint8"),
        ({"staging": [staging_of(2 * STAGING)[0][::2]]}, "one dense axis"),
        ({"staging": [staging_of()[0].view(-1, 1)]}, "one dense axis"),
        ({"staging": [staging_of()[0].to("meta")]}, "host memory"),
        ({"staging": [staging_of(STAGING + 1)[0][1:]]}, "aligned to elements"),
        ({"staging": [without_memory(staging_of()[0])]}, "staging as uint8"),
        ({"collector": COLLECTOR.float()}, "a collector of"),
        ({"collector": COLLECTOR[1:]}, "at least 256 bytes"),
        ({"collector": COLLECTOR.view(2, -1)}, "one dense axis"),
        ({"collector": COLLECTOR.to("meta")}, "and device"),
        ({"batch_bytes": 0}, "at least 1 byte"),
        ({"part_bytes": 0}, "at least 1 byte"),
        ({"threads": 0}, "threads of 1 to 64, got 0"),
        ({"threads": 65}, "threads of 1 to 64, got 65"),
        ({"threads": 2**31 - 1}, "threads of 1 to 64"),
    ],
)
@pytest.mark.parametrize("to_host", [True, False])
def test_a_run_refuses_before_the_first_byte_moves(
    good: dict[str, Any], change: dict[str, Any], says: str, to_host: bool
) -> None:
    sources = good["layers"] if to_host else good["chunks"]
    targets = good["chunks"] if to_host else good["layers"]
    for source in sources:
        source.fill_(1)
    plan = kv_transpose.plan_host(to_host, **good)
    with pytest.raises(ValueError, match=says):
        run(plan, **({"staging": staging_of()} | change))
    assert not any(bool(target.any()) for target in targets)
    run(plan, staging_of())
    assert any(bool(target.any()) for target in targets)


@pytest.mark.parametrize("of", ["layers", "chunks"])
@pytest.mark.parametrize("to_host", [True, False])
def test_memory_that_was_resized_since_it_was_planned_is_refused(
    good: dict[str, Any], of: str, to_host: bool
) -> None:
    plan = kv_transpose.plan_host(to_host, **good)
    storage = good[of][-1].untyped_storage()
    # Elsewhere now, or gone.
    for size in (2 * storage.nbytes(), 0):
        storage.resize_(size)
        with pytest.raises(ValueError, match="resized since"):
            run(plan, staging_of())


@pytest.mark.npu
def test_a_collector_without_staging_is_refused() -> None:
    layers = [torch.zeros(4, 4, 8, dtype=torch.float16).to("rbln:0")]
    chunk = torch.zeros(1, 4, 8, dtype=torch.float16, pin_memory=True)
    case = Case("mla", 1, 4, 1, 4, 8, torch.float16)
    plan = kv_transpose.plan_host(True, **arguments_of(case, layers, [chunk], [2], 4))
    assert plan.in_place
    stream, probe = torch.rbln.Stream("rbln:0"), make_probe(torch.device("rbln:0"))
    collector = torch.zeros(64, dtype=torch.float16).to("rbln:0")
    with pytest.raises(ValueError, match="staging with a collector"):
        kv_transpose.run(plan, [], collector, stream, probe)
    with pytest.raises(ValueError, match="staging with a collector"):
        kv_transpose.copy_times(plan, [], collector, stream, probe)


def test_nothing_to_move_is_no_error(good: dict[str, Any]) -> None:
    for to_host in (True, False):
        plan = kv_transpose.plan_host(to_host, **(good | {"skip_blocks": 7}))
        assert (plan.segments, plan.bytes, plan.largest_bytes) == (0, 0, 0)
        run(plan, staging_of())


@pytest.mark.parametrize(
    ("layout", "segments"), [("blocks_first", 3), ("kv_first", 6), ("mla", 3)]
)
def test_adjacent_blocks_and_planes_that_meet_are_one_segment(
    layout: Layout, segments: int
) -> None:
    case = Case(layout, 1, 12)
    layers = [torch.zeros(case.layer_shape, dtype=case.dtype)]
    chunks = [torch.zeros(case.chunk_shape(24), dtype=case.dtype)]
    arguments = arguments_of(case, layers, chunks, [3, 4, 5, 1, 2, 9], 24)
    plan = kv_transpose.plan_host(True, **arguments)
    assert plan.segments == segments
    halves = [chunks[0][..., :12, :].clone() for _ in range(2)]
    arguments |= {"chunks": halves, "chunk_tokens": 12, "block_ids": list(range(6))}
    # They end at chunks.
    assert (
        kv_transpose.plan_host(True, **arguments).segments == segments - segments // 3
    )
    # And at the limit.
    arguments |= {"max_bytes": plan.bytes // (12 if layout == "kv_first" else 6)}
    assert kv_transpose.plan_host(True, **arguments).segments == 2 * segments


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
    expected = {
        name: [tensor.clone() for tensor in good[name]] for name in ("layers", "chunks")
    }
    run(kv_transpose.plan_host(to_host, **(good | expected)), staging_of())
    plan = kv_transpose.plan_host(to_host, **good)
    staging = staging_of()

    def spoil() -> None:
        for name in ("chunks", "layers", "block_ids"):
            good[name].clear()
        staging.clear()
        gc.collect()

    meanwhile = Meanwhile(spoil)
    with meanwhile:
        # A batch for each segment, so that copies follow.
        run(plan, staging, batch_bytes=1)
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

    run(kv_transpose.plan_host(True, **(good | {"layers": Fresh()})), staging_of())
    assert bool((good["chunks"][0] == 1).all())


def test_threads_share_the_helpers(good: dict[str, Any]) -> None:
    layers = [random_bits(CASE.layer_shape, CASE.dtype, i) for i in range(2)]
    wanted = [torch.zeros(CASE.chunk_shape(8), dtype=CASE.dtype)]
    move(CASE, True, layers, wanted, [2, 0], 8)

    def work() -> None:
        chunk = torch.zeros(CASE.chunk_shape(8), dtype=CASE.dtype)
        mine = good | {"layers": layers, "chunks": [chunk]}
        plan, staging = kv_transpose.plan_host(True, **mine), staging_of()
        for _ in range(200):
            chunk.zero_()
            run(plan, staging, threads=3)
            assert_same_bytes([chunk], wanted)

    with ThreadPoolExecutor(4) as executor:
        for result in [executor.submit(work) for _ in range(4)]:
            result.result()


@given(
    layout=st.sampled_from(LAYOUTS),
    sizes=st.tuples(*[st.integers(1, 4)] * 4),
    split=st.integers(0, 3),
    skip=st.integers(0, 3),
    to_chunks=st.booleans(),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_whole_blocks_are_copied_on_their_device(
    layout: Layout,
    sizes: tuple[int, int, int, int],
    split: int,
    skip: int,
    to_chunks: bool,
    data: st.DataObject,
) -> None:
    """Here the device is the host: what the chunk holds is told by plain indexing."""
    case = Case(layout, 2, *sizes, torch.float16)
    ids = data.draw(st.permutations(range(case.num_blocks)))
    parts = [part for part in (ids[:split], ids[split:]) if part]
    axis = 1 if layout == "kv_first" else 0
    layers = [random_bits(case.layer_shape, case.dtype, i) for i in range(2)]
    wanted_layers = [layer.clone() for layer in layers]
    shape = list(case.layer_shape)
    chunks, wanted, blocks = [], [], []
    for number, part in enumerate(parts):
        left = min(skip, len(part))
        shape[axis] = len(part)
        whole = random_bits((2, *shape), case.dtype, 7 + number)
        chunks.append(whole.flatten().clone())
        wanted.append(whole)
        blocks.append((part, left))
        for layer, of_chunk in zip(wanted_layers, whole, strict=True):
            for position in range(left, len(part)):
                one = of_chunk.select(axis, position)
                other = layer.select(axis, part[position])
                one.copy_(other) if to_chunks else other.copy_(one)
    geometry = resolve_geometry(layer_traits(layers), case.engine_kv_format)
    plan = kv_transpose.plan_device(
        to_chunks, layers, geometry.sizes, geometry.strides, chunks, blocks
    )
    assert plan.on_device
    with pytest.raises(ValueError, match="no staging"):
        run(plan, staging_of())
    run(plan, [])
    assert_same_bytes(
        [*layers, *chunks], [*wanted_layers, *[w.flatten() for w in wanted]]
    )


@pytest.mark.parametrize(
    ("chunk", "blocks", "says"),
    [
        (
            torch.zeros(511, dtype=CASE.dtype),
            ([2, 0], 0),
            "one dense axis of 1024 bytes",
        ),
        (torch.zeros(512, dtype=torch.int16), ([2, 0], 0), "chunk 0 is torch.int16"),
        (torch.zeros(2, 256, dtype=CASE.dtype), ([2, 0], 0), "one dense axis"),
        (torch.zeros(512, dtype=CASE.dtype), ([2, 4], 0), "block id 4"),
        (torch.zeros(512, dtype=CASE.dtype), ([2, 0], 3), "0 to 2 blocks to skip"),
        (torch.zeros(512, dtype=CASE.dtype), ([2, 2], 0), "destinations"),
        (torch.zeros(512, dtype=CASE.dtype, device="meta"), ([2, 0], 0), "on cpu"),
        (without_memory(torch.zeros(512, dtype=CASE.dtype)), ([2, 0], 0), "memory"),
    ],
)
def test_a_plan_on_the_device_refuses_what_would_leave_memory(
    good: dict[str, Any], chunk: torch.Tensor, blocks: Any, says: str
) -> None:
    arguments = [good[name] for name in ("layers", "sizes", "strides")]
    with pytest.raises(ValueError, match=says):
        kv_transpose.plan_device(False, *arguments, [chunk], [blocks])
    with pytest.raises(ValueError, match="block ids of each chunk"):
        kv_transpose.plan_device(False, *arguments, [chunk], [])


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
    plan = kv_transpose.plan_host(
        to_host, **arguments_of(case, layers, [chunk], ids, 8)
    )
    # Only pinned memory is, by itself.
    assert not plan.in_place
    with pytest.raises(ValueError, match="staging, unless"):
        run(plan, [])
    run(plan, [torch.zeros(plan.largest_bytes, dtype=torch.uint8)])
    assert_same_bytes([memory, *layers], [wanted_memory, *wanted_layers])
