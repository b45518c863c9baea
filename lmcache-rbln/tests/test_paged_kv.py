# SPDX-License-Identifier: Apache-2.0
"""Chunks between LMCache's memory objects and the paged KV cache, byte by byte."""

# Standard
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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
    upload,
)
import pytest
import torch

# First Party
from benchmarks._stock import load_ops
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache_rbln import kv_cache
from lmcache_rbln.paged_kv import RBLNPagedKVConnector, TransferFailedError

pytestmark = pytest.mark.npu
DEVICE = "rbln:0"


def metadata_of(case: Case, chunk_tokens: int) -> LMCacheMetadata:
    return LMCacheMetadata(
        model_name="m",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=case.dtype,
        kv_shape=(
            case.num_layers,
            case.planes,
            chunk_tokens,
            case.heads,
            case.head_size,
        ),
        use_mla=case.layout == "mla",
        chunk_size=chunk_tokens,
    )


class Cache:
    """A paged KV cache on the device, its twin on the host and a connector."""

    def __init__(
        self,
        layout: Layout,
        blocks_per_chunk: int = 2,
        **sizes: Any,
    ) -> None:
        self.case = Case(layout, **({"num_blocks": 9, "block_size": 4} | sizes))
        self.chunk_tokens = blocks_per_chunk * self.case.block_size
        self.metadata = metadata_of(self.case, self.chunk_tokens)
        self.host = [
            random_bits(self.case.layer_shape, self.case.dtype, seed)
            for seed in range(self.case.num_layers)
        ]
        self.layers = [upload(layer, DEVICE) for layer in self.host]
        self.connector = RBLNPagedKVConnector(self.metadata)
        self.allocated: list[MemoryObj] = []

    def __del__(self) -> None:
        for obj in self.allocated:
            obj.ref_count_down()

    def slots(self, block_ids: Sequence[int], tokens: int) -> torch.Tensor:
        """As LMCache makes a request's slot mapping."""
        size = self.case.block_size
        blocks = torch.tensor(block_ids).reshape(-1, 1) * size
        return (blocks + torch.arange(size).reshape(1, -1)).flatten()[:tokens]

    def ranges(self, tokens: int, first: int = 0) -> tuple[list[int], list[int]]:
        starts = list(range(first, tokens, self.chunk_tokens))
        return starts, [min(s + self.chunk_tokens, tokens) for s in starts]

    def objects(self, starts: list[int], ends: list[int]) -> list[MemoryObj]:
        """Memory objects as LMCache allocates them, full of random bits."""
        allocator = AdHocMemoryAllocator("cpu")
        mla = self.case.layout == "mla"
        fmt = MemoryFormat.KV_MLA_FMT if mla else MemoryFormat.KV_2LTD
        objects = []
        for seed, (start, end) in enumerate(zip(starts, ends, strict=True)):
            shape = self.metadata.get_shapes(end - start)[0]
            assert shape == self.connector.get_shape(end - start)
            obj = allocator.allocate(shape, self.case.dtype, fmt)
            assert obj is not None
            assert obj.tensor is not None
            obj.tensor.copy_(random_bits(tuple(shape), self.case.dtype, 1000 + seed))
            objects.append(obj)
        self.allocated += objects
        return objects

    def chunks(self, objects: Sequence[MemoryObj]) -> list[torch.Tensor]:
        """The objects' tensors as the reference wants them."""
        tensors = [obj.tensor for obj in objects]
        assert all(tensor is not None for tensor in tensors)
        mla = self.case.layout == "mla"
        return [t.squeeze(0) if mla else t for t in tensors if t is not None]

    def store(
        self, objects: list[MemoryObj], block_ids: list[int], tokens: int, first: int
    ) -> None:
        starts, ends = self.ranges(tokens, first)
        self.connector.batched_from_gpu(
            objects,
            starts,
            ends,
            kvcaches=self.layers,
            slot_mapping=self.slots(block_ids, tokens),
            offset=first,
            req_id="r",
        )

    def load(
        self,
        objects: list[MemoryObj],
        block_ids: list[int],
        tokens: int,
        first: int,
        cached: int,
    ) -> None:
        starts, ends = self.ranges(tokens, first)
        self.connector.batched_to_gpu(
            objects,
            starts,
            ends,
            kvcaches=self.layers,
            slot_mapping=self.slots(block_ids, tokens),
            vllm_cached_tokens=cached,
            req_id="r",
        )


def check(
    cache: Cache, block_ids: list[int], tokens: int, first_chunk: int, cached: int
) -> None:
    """Compare a store and a load of one request with the reference."""
    first = first_chunk * cache.chunk_tokens
    size = cache.case.block_size
    blocks = block_ids[: -(-tokens // size)]
    rest = blocks[first // size :]
    starts, ends = cache.ranges(tokens, first)

    stored = cache.objects(starts, ends)
    wanted = [chunk.clone() for chunk in cache.chunks(stored)]
    move(cache.case, True, cache.host, wanted, rest, cache.chunk_tokens)
    cache.store(stored, block_ids, tokens, first)
    assert_same_bytes(cache.chunks(stored), wanted)

    loaded = cache.objects(starts, ends)
    given_chunks = [chunk.clone() for chunk in cache.chunks(loaded)]
    skip = len(rest) if cached >= tokens else max(0, cached - first) // size
    move(cache.case, False, cache.host, given_chunks, rest, cache.chunk_tokens, skip)
    cache.load(loaded, block_ids, tokens, first, cached)
    assert_same_bytes(cache.layers, cache.host)
    assert_same_bytes(cache.chunks(loaded), given_chunks)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3])
@pytest.mark.parametrize(
    ("tokens", "first_chunk", "cached"),
    [(24, 0, 0), (24, 1, 0), (22, 0, 0), (13, 0, 4), (24, 0, 12), (24, 0, 16)],
)
def test_store_and_load(
    layout: Layout, blocks_per_chunk: int, tokens: int, first_chunk: int, cached: int
) -> None:
    cache = Cache(layout, blocks_per_chunk)
    check(cache, [7, 0, 3, 8, 2, 5], tokens, first_chunk, cached)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_sizes(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(LAYOUTS))
    num_blocks = data.draw(st.integers(3, 9))
    cache = Cache(
        layout,
        data.draw(st.integers(1, 3)),
        num_blocks=num_blocks,
        num_layers=data.draw(st.integers(1, 3)),
        num_heads=data.draw(st.integers(1, 3)),
        block_size=data.draw(st.sampled_from([1, 2, 8])),
        head_size=data.draw(st.sampled_from([1, 8])),
        dtype=data.draw(st.sampled_from([torch.bfloat16, torch.float32])),
    )
    count = data.draw(st.integers(1, num_blocks))
    block_ids = data.draw(st.permutations(range(num_blocks)))[:count]
    tokens = data.draw(st.integers(1, count * cache.case.block_size))
    chunks = -(-tokens // cache.chunk_tokens)
    first_chunk = data.draw(st.integers(0, chunks - 1))
    cached = data.draw(st.integers(0, count)) * cache.case.block_size
    check(cache, block_ids, tokens, first_chunk, min(cached, tokens))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_cached_moves_nothing(layout: Layout) -> None:
    cache = Cache(layout)
    starts, ends = cache.ranges(16)
    cache.load(cache.objects(starts, ends), [1, 2, 3, 4], 16, 0, 16)
    assert_same_bytes(cache.layers, cache.host)


def test_one_chunk_at_a_time() -> None:
    cache = Cache("blocks_first")
    (obj,) = cache.objects([8], [14])
    slots = cache.slots([7, 0, 3, 8], 14)
    wanted = [chunk.clone() for chunk in cache.chunks([obj])]
    move(cache.case, True, cache.host, wanted, [3, 8], 8)
    cache.connector.from_gpu(obj, 8, 14, kvcaches=cache.layers, slot_mapping=slots)
    assert_same_bytes(cache.chunks([obj]), wanted)
    move(cache.case, False, cache.host, wanted, [3, 8], 8, 1)
    cache.connector.to_gpu(
        obj, 8, 14, kvcaches=cache.layers, slot_mapping=slots, vllm_cached_tokens=12
    )
    assert_same_bytes(cache.layers, cache.host)


def test_a_short_chunk_in_the_middle() -> None:
    cache = Cache("blocks_first")
    starts, ends = [0, 8, 12], [8, 12, 20]
    objects = cache.objects(starts, ends)
    wanted = [chunk.clone() for chunk in cache.chunks(objects)]
    move(cache.case, True, cache.host, wanted[:2], [5, 1, 8], 8)
    move(cache.case, True, cache.host, wanted[2:], [0, 2], 8)
    cache.connector.batched_from_gpu(
        objects,
        starts,
        ends,
        kvcaches=cache.layers,
        slot_mapping=cache.slots([5, 1, 8, 0, 2], 20),
    )
    assert_same_bytes(cache.chunks(objects), wanted)


@pytest.mark.deferred
@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_in_flight_in_several_threads(layout: Layout) -> None:
    cache = Cache(layout, num_blocks=24)
    requests = [list(range(start, start + 4)) for start in range(0, 24, 4)]
    starts, ends = cache.ranges(16)
    stored = [cache.objects(starts, ends) for _ in requests]
    wanted = []
    for block_ids, objects in zip(requests, stored, strict=True):
        chunks = [chunk.clone() for chunk in cache.chunks(objects)]
        move(cache.case, True, cache.host, chunks, block_ids, 8)
        wanted.append(chunks)
    # Each request's chunks go to the next one's blocks.
    targets = [*requests[1:], requests[0]]
    with ThreadPoolExecutor(len(requests)) as pool:
        list(pool.map(lambda o, b: cache.store(o, b, 16, 0), stored, requests))
        list(pool.map(lambda o, b: cache.load(o, b, 16, 0, 0), stored, targets))
    for objects, chunks, block_ids in zip(stored, wanted, targets, strict=True):
        assert_same_bytes(cache.chunks(objects), chunks)
        move(cache.case, False, cache.host, chunks, block_ids, 8)
    assert_same_bytes(cache.layers, cache.host)


def test_new_tensors_take_the_place_of_the_old_ones() -> None:
    cache = Cache("blocks_first")
    cache.connector.register(cache.layers)
    other = Cache("blocks_first", num_blocks=20)
    starts, ends = other.ranges(8)
    objects = other.objects(starts, ends)
    wanted = [chunk.clone() for chunk in other.chunks(objects)]
    move(other.case, True, other.host, wanted, [17, 19], 8)
    cache.connector.batched_from_gpu(
        objects,
        starts,
        ends,
        kvcaches=other.layers,
        slot_mapping=other.slots([17, 19], 8),
    )
    assert_same_bytes(other.chunks(objects), wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 3}, "layers: the KV cache has 3, but LMCache expects 2"),
        ({"num_heads": 1}, "elements per token: the KV cache has 8"),
        ({"dtype": torch.float16}, "dtype: the KV cache has torch.float16"),
        ({"block_size": 3}, "chunk size is 8 tokens, wanted a multiple of .* 3"),
    ],
)
def test_a_cache_of_another_model_is_refused(
    change: dict[str, Any], message: str
) -> None:
    connector = Cache("blocks_first").connector
    with pytest.raises(ValueError, match=message):
        connector.register(Cache("blocks_first", **change).layers)


def test_meta_tensors_are_refused() -> None:
    cache = Cache("blocks_first")
    layers = [torch.empty(cache.case.layer_shape, device="meta")] * 2
    with pytest.raises(ValueError, match="VLLM_RBLN_USE_DEVICE_TENSOR=1"):
        cache.connector.register(layers)


@pytest.mark.parametrize(
    ("slots", "start", "end", "message"),
    [
        (torch.arange(8), 2, 8, "a multiple of the block size 4"),
        (torch.arange(8), 4, 12, "inside of 8 tokens"),
        (torch.arange(8), 4, 4, "inside of 8 tokens"),
        (torch.arange(8) + 1, 0, 8, "do not fill blocks"),
        (torch.arange(7, -1, -1), 0, 8, "do not fill blocks"),
        (torch.arange(400, 408), 0, 8, "outside of the KV cache"),
    ],
)
def test_a_range_that_does_not_fit_is_refused(
    slots: torch.Tensor, start: int, end: int, message: str
) -> None:
    cache = Cache("blocks_first")
    objects = cache.objects([0], [8])
    with pytest.raises(TransferFailedError, match=message) as caught:
        cache.connector.batched_to_gpu(
            objects, [start], [end], kvcaches=cache.layers, slot_mapping=slots
        )
    assert caught.value.memory_objs == objects
    assert_same_bytes(cache.layers, cache.host)


def on_device(cache: Cache, tokens: int) -> MemoryObj:
    obj = AdHocMemoryAllocator(DEVICE).allocate(
        cache.connector.get_shape(tokens), cache.case.dtype
    )
    assert obj is not None
    cache.allocated.append(obj)
    return obj


def test_memory_objects_on_the_device_without_a_transfer_for_them() -> None:
    cache = Cache("blocks_first")
    with pytest.raises(TransferFailedError, match="without a storage backend"):
        cache.store([on_device(cache, 8)], [7, 0], 8, 0)


@pytest.mark.parametrize("layout", ["kv_first", "mla"])
@pytest.mark.parametrize(("tokens", "cached"), [(24, 0), (24, 8)])
def test_over_the_operations_of_stock_lmcache(
    layout: Layout, tokens: int, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its public operations are the same; they know two layouts and whole chunks."""
    stock = load_ops()
    monkeypatch.setattr(kv_cache, "resolve_device_ops", lambda _: stock)
    check(Cache(layout), [7, 0, 3, 8, 2, 5], tokens, 0, cached)
