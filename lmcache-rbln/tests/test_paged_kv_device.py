# SPDX-License-Identifier: Apache-2.0
"""Whole blocks between the paged cache and chunks on its device, and plain indexing."""

# Standard
from typing import Any
from unittest.mock import MagicMock
import random

# Third Party
from kv_reference import LAYOUTS, Case, Layout, assert_same_bytes, random_bits, upload
from rds_support import device_chunks, paged_kv_of, staged
import pytest
import torch

# First Party
from lmcache.v1.platform.devices.rbln.device_ops import RblnDeviceOps
from lmcache.v1.platform.devices.rbln.block_transfer import StillInFlightError
from lmcache_rbln.paged_kv import TransferFailedError
from lmcache_rbln.storage_plugin.rds.staging import StagedMemoryObj, StagingAllocator

pytestmark = [pytest.mark.npu, pytest.mark.deferred]
DEVICE = "rbln:0"
CHUNK_BLOCKS = 2


class Cache:
    """A paged cache on the device, its twin on the host, and a connector."""

    def __init__(
        self, layout: Layout, chunk_blocks: int = CHUNK_BLOCKS, **sizes: Any
    ) -> None:
        self.case = Case(layout, **({"num_blocks": 9, "block_size": 4} | sizes))
        self.axis = 1 if layout == "kv_first" else 0
        self.host = [
            random_bits(self.case.layer_shape, self.case.dtype, seed)
            for seed in range(self.case.num_layers)
        ]
        self.layers = [upload(layer, DEVICE) for layer in self.host]
        self.connector = paged_kv_of(self.case, chunk_blocks * self.case.block_size)

    def chunk_of(self, ids: list[int]) -> torch.Tensor:
        """The bytes that a chunk of these blocks must hold."""
        parts = [
            layer.index_select(self.axis, torch.tensor(ids)) for layer in self.host
        ]
        return torch.stack(parts).contiguous().view(torch.uint8).flatten()

    def move(
        self,
        name: str,
        objs: list[StagedMemoryObj],
        ids: list[list[int]],
        cached: int = 0,
    ) -> None:
        """``gather`` or ``scatter`` chunks of whole blocks of one request."""
        size = self.case.block_size
        blocks = [block for chunk in ids for block in chunk]
        ends = [0]
        for chunk in ids:
            ends.append(ends[-1] + size * len(chunk))
        gathers = name == "gather"
        connector = self.connector
        (connector.batched_from_gpu if gathers else connector.batched_to_gpu)(
            objs,
            ends[:-1],
            ends[1:],
            kvcaches=self.layers,
            slot_mapping=torch.tensor(
                [b * size + t for b in blocks for t in range(size)]
            ),
            vllm_cached_tokens=cached * size,
        )

    def check(self) -> None:
        for layer, twin in zip(self.layers, self.host, strict=True):
            assert_same_bytes(layer.cpu(), twin)


@pytest.fixture
def allocator() -> StagingAllocator:
    pytest.importorskip("rebel.rds")
    return device_chunks(64 << 10)


def chunk(allocator: StagingAllocator, cache: Cache) -> StagedMemoryObj:
    obj = staged(allocator, cache.case)
    obj.payload.fill_(0xEE)
    return obj


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "ids", [[3], [2, 3, 4], [8, 0, 5], [4, 3], [1, 2, 7, 8, 0]], ids=str
)
def test_a_chunk_holds_its_blocks_in_the_devices_order(
    allocator: StagingAllocator, layout: Layout, ids: list[int]
) -> None:
    cache = Cache(layout, 5)
    obj = chunk(allocator, cache)
    cache.move("gather", [obj], [ids])
    got, want = obj.payload.cpu(), cache.chunk_of(ids)
    assert torch.equal(got[: len(want)], want)
    assert (got[len(want) :] == 0xEE).all()
    assert obj.payload_bytes == len(want)
    assert obj.block_size == cache.case.block_size
    cache.check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(4))
def test_scatter_writes_the_blocks_asked_for_and_no_other(
    allocator: StagingAllocator, layout: Layout, seed: int
) -> None:
    chance = random.Random(seed)
    cache = Cache(layout, dtype=chance.choice([torch.bfloat16, torch.float16]))
    order = chance.sample(range(9), 9)
    sources, targets = [order[:2], order[2:4]], [order[4:6], order[6:8]]
    objs = [chunk(allocator, cache) for _ in sources]
    cache.move("gather", objs, sources)
    held = [cache.chunk_of(ids) for ids in sources]
    skip = chance.randrange(4)
    cache.move("scatter", objs, targets, cached=skip)
    for number, bits in enumerate(held):
        shape = list(cache.case.layer_shape)
        shape[cache.axis] = 2
        parts = bits.view(cache.case.dtype).view(cache.case.num_layers, *shape)
        for layer, part in zip(cache.host, parts, strict=True):
            for place in range(max(0, skip - 2 * number), 2):
                layer.select(cache.axis, targets[number][place]).copy_(
                    part.select(cache.axis, place)
                )
    cache.check()


def test_a_gather_is_ordered_before_the_next_write_to_its_blocks(
    allocator: StagingAllocator,
) -> None:
    cache = Cache("blocks_first")
    obj = chunk(allocator, cache)
    want = cache.chunk_of([1, 2])
    cache.move("gather", [obj], [[1, 2]])
    for layer in cache.layers:
        layer.copy_(torch.zeros(layer.shape, dtype=layer.dtype))
    assert torch.equal(obj.payload.cpu()[: len(want)], want)


def test_a_gather_comes_behind_what_its_caller_has_queued(
    allocator: StagingAllocator,
) -> None:
    cache = Cache("blocks_first")
    stream = torch.rbln.Stream(device=DEVICE)  # type: ignore[attr-defined]
    new = [layer.flip(0).contiguous().pin_memory() for layer in cache.host]
    obj = chunk(allocator, cache)
    with torch.rbln.stream(stream):  # type: ignore[attr-defined]
        for layer, host in zip(cache.layers, new, strict=True):
            layer.copy_(host, non_blocking=True)
        cache.move("gather", [obj], [[1, 2]])
    cache.host = new
    want = cache.chunk_of([1, 2])
    assert torch.equal(obj.payload.cpu()[: len(want)], want)


def test_what_does_not_fit_is_refused_before_a_byte_moves(
    allocator: StagingAllocator,
) -> None:
    cache = Cache("blocks_first")
    obj = chunk(allocator, cache)
    cache.move("gather", [obj], [[1]])
    for name in ("gather", "scatter"):
        with pytest.raises(TransferFailedError, match="block id 9 is outside"):
            cache.move(name, [obj], [[9]])
    with pytest.raises(
        TransferFailedError, match="destinations of more than one|named twice"
    ):
        cache.move("scatter", [obj, obj], [[2], [2]])
    other = chunk(allocator, cache)
    with pytest.raises(TransferFailedError, match="laid out as token-major"):
        cache.move("scatter", [other], [[1]])
    with pytest.raises(TransferFailedError, match="laid out as rbln-blocks-first"):
        Cache("mla").move("scatter", [obj], [[1]])
    cache.check()
    big = Cache("blocks_first", 512, num_blocks=512, num_layers=1)
    with pytest.raises(TransferFailedError, match="chunk 0"):
        big.move("gather", [other], [list(range(512))])
    assert (other.payload.cpu() == 0xEE).all()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StillInFlightError("planted")])
@pytest.mark.parametrize("move", ["gather", "scatter"])
def test_memory_that_copies_may_still_use_is_not_used_again(
    allocator: StagingAllocator,
    monkeypatch: pytest.MonkeyPatch,
    move: str,
    error: BaseException,
) -> None:
    """An interrupt may have taken the place of the error that says so."""
    cache = Cache("blocks_first")
    obj = chunk(allocator, cache)
    cache.move("gather", [obj], [[1, 2]])
    fails = MagicMock(side_effect=error)
    monkeypatch.setattr(RblnDeviceOps, "copy_blocks_on_device", fails)
    with pytest.raises((KeyboardInterrupt, TransferFailedError)):
        cache.move(move, [obj], [[1, 2]])
    assert obj.retired
    free = allocator.free_slots
    obj.ref_count_down()
    assert allocator.free_slots == free
    assert allocator.memcheck()
