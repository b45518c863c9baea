# SPDX-License-Identifier: Apache-2.0
"""Whole blocks between the paged cache and staging memory, against CPU indexing."""

# Standard
from typing import Any
import random

# Third Party
from kv_reference import LAYOUTS, Case, Layout, assert_same_bytes, random_bits, upload
import pytest
import torch

# First Party
from lmcache_rbln import device_streams, paged_kv_device
from lmcache_rbln.device_streams import DeviceStreams, InFlightError
from lmcache_rbln.paged_kv import ChunkBlocks, PagedKV
from lmcache_rbln.paged_kv_device import DeviceBlockTransfer
from lmcache_rbln.storage_plugin.rds_device import RDSDevice
from lmcache_rbln.storage_plugin.rds_staging import StagedMemoryObj, StagingAllocator

pytestmark = [pytest.mark.npu, pytest.mark.deferred]
DEVICE = "rbln:0"


class Cache:
    """A paged cache on the device and its twin on the host."""

    def __init__(self, layout: Layout, **sizes: Any) -> None:
        self.case = Case(layout, **({"num_blocks": 9, "block_size": 4} | sizes))
        self.axis = 1 if layout == "kv_first" else 0
        self.host = [
            random_bits(self.case.layer_shape, self.case.dtype, seed)
            for seed in range(self.case.num_layers)
        ]
        self.layers = [upload(layer, DEVICE) for layer in self.host]
        self.kv = PagedKV.of(self.layers)

    def chunk_of(self, ids: list[int]) -> torch.Tensor:
        """The bytes that a chunk of these blocks must hold."""
        parts = [
            layer.index_select(self.axis, torch.tensor(ids)) for layer in self.host
        ]
        return torch.stack(parts).contiguous().view(torch.uint8).flatten()

    def check(self) -> None:
        for layer, twin in zip(self.layers, self.host, strict=True):
            assert_same_bytes(layer.cpu(), twin)


@pytest.fixture
def allocator() -> StagingAllocator:
    pytest.importorskip("rebel.rds")
    device = RDSDevice(torch.device(DEVICE), numa_node=0)
    return StagingAllocator(device, 1 << 20, 64 << 10)


def staged(
    allocator: StagingAllocator, cache: Cache, ids: list[int], **changes: Any
) -> ChunkBlocks:
    obj = allocator.allocate(torch.Size([2, 2, 4, 4]), cache.case.dtype)
    assert obj is not None
    obj.slot.payload.fill_(0xEE)
    fields = {"tokens": len(ids) * cache.case.block_size, "skip_blocks": 0} | changes
    return ChunkBlocks(obj, fields["tokens"], ids, fields["skip_blocks"])


def payload(chunk: ChunkBlocks) -> torch.Tensor:
    assert isinstance(chunk.memory_obj, StagedMemoryObj)
    return chunk.memory_obj.slot.payload.cpu()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "ids", [[3], [2, 3, 4], [8, 0, 5], [4, 3], [1, 2, 7, 8, 0]], ids=str
)
def test_a_chunk_holds_its_blocks_in_the_devices_order(
    allocator: StagingAllocator, layout: Layout, ids: list[int]
) -> None:
    cache = Cache(layout)
    chunk = staged(allocator, cache, ids)
    DeviceBlockTransfer().gather(cache.kv, [chunk])
    got, want = payload(chunk), cache.chunk_of(ids)
    assert torch.equal(got[: len(want)], want)
    assert (got[len(want) :] == 0xEE).all()
    obj = chunk.memory_obj
    assert isinstance(obj, StagedMemoryObj)
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
    sources = [order[:2], order[2:4]]
    chunks = [staged(allocator, cache, ids) for ids in sources]
    transfer = DeviceBlockTransfer()
    transfer.gather(cache.kv, chunks)
    held = [cache.chunk_of(ids) for ids in sources]
    skip = chance.randrange(3)
    targets = [order[4:6], order[6:8]]
    transfer.scatter(
        cache.kv,
        [
            ChunkBlocks(chunks[0].memory_obj, 8, targets[0], skip),
            ChunkBlocks(chunks[1].memory_obj, 8, targets[1], 0),
        ],
    )
    for bits, ids, skipped in zip(held, targets, (skip, 0), strict=True):
        shape = list(cache.case.layer_shape)
        shape[cache.axis] = 2
        parts = bits.view(cache.case.dtype).view(cache.case.num_layers, *shape)
        for layer, part in zip(cache.host, parts, strict=True):
            for place in range(skipped, 2):
                layer.select(cache.axis, ids[place]).copy_(
                    part.select(cache.axis, place)
                )
    cache.check()


def test_a_gather_is_ordered_before_the_next_write_to_its_blocks(
    allocator: StagingAllocator,
) -> None:
    cache = Cache("blocks_first")
    chunk = staged(allocator, cache, [1, 2])
    want = cache.chunk_of([1, 2])
    DeviceBlockTransfer().gather(cache.kv, [chunk])
    for layer in cache.layers:
        layer.copy_(torch.zeros(layer.shape, dtype=layer.dtype))
    assert torch.equal(payload(chunk)[: len(want)], want)


def test_what_does_not_fit_is_refused_before_a_byte_moves(
    allocator: StagingAllocator,
) -> None:
    cache = Cache("blocks_first")
    transfer = DeviceBlockTransfer()
    good = staged(allocator, cache, [1])
    transfer.gather(cache.kv, [good])
    good_obj = good.memory_obj
    for ids, why in (([9], "blocks 9 to 9 wanted"), ([-1, 3], "blocks -1 to 3")):
        with pytest.raises(ValueError, match=why):
            transfer.gather(cache.kv, [staged(allocator, cache, ids)])
        with pytest.raises(ValueError, match=why):
            transfer.scatter(cache.kv, [ChunkBlocks(good_obj, 4, ids, 0)])
    with pytest.raises(ValueError, match="more than the staging memory's 65536"):
        transfer.gather(cache.kv, [staged(allocator, cache, [0] * 2000)])
    with pytest.raises(ValueError, match="written twice"):
        transfer.scatter(
            cache.kv,
            [ChunkBlocks(good_obj, 4, [2], 0), ChunkBlocks(good_obj, 4, [2], 0)],
        )
    with pytest.raises(ValueError, match="laid out as token-major"):
        transfer.scatter(cache.kv, [staged(allocator, cache, [1])])
    with pytest.raises(ValueError, match="laid out as rbln-blocks-first"):
        transfer.scatter(Cache("mla").kv, [good])
    cache.check()


@pytest.mark.parametrize("move", ["gather", "scatter"])
def test_memory_with_copies_under_way_is_not_used_again(
    allocator: StagingAllocator, monkeypatch: pytest.MonkeyPatch, move: str
) -> None:
    cache = Cache("blocks_first")
    chunk = staged(allocator, cache, [1, 2])
    transfer = DeviceBlockTransfer()
    transfer.gather(cache.kv, [chunk])
    streams = DeviceStreams(torch.device(DEVICE))

    def drain(self: Any) -> None:
        raise InFlightError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(paged_kv_device, "streams_of", lambda device: streams)
        planted.setattr(device_streams._OwnStream, "drain", drain)
        with pytest.raises(InFlightError):
            getattr(transfer, move)(cache.kv, [chunk])
    free = allocator.free_slots
    chunk.memory_obj.ref_count_down()
    assert allocator.free_slots == free
    assert allocator.memcheck()


def test_a_gather_comes_behind_what_its_caller_has_queued(
    allocator: StagingAllocator,
) -> None:
    cache = Cache("blocks_first")
    stream = torch.rbln.Stream(device=DEVICE)  # type: ignore[attr-defined]
    new = [layer.flip(0).contiguous().pin_memory() for layer in cache.host]
    chunk = staged(allocator, cache, [1, 2])
    with torch.rbln.stream(stream):  # type: ignore[attr-defined]
        for layer, host in zip(cache.layers, new, strict=True):
            layer.copy_(host, non_blocking=True)
        DeviceBlockTransfer().gather(cache.kv, [chunk])
    cache.host = new
    want = cache.chunk_of([1, 2])
    assert torch.equal(payload(chunk)[: len(want)], want)


@pytest.mark.parametrize("move", ["gather", "scatter"])
def test_a_failure_midway_leaves_no_copy_under_way(
    allocator: StagingAllocator, monkeypatch: pytest.MonkeyPatch, move: str
) -> None:
    """What was queued before it would end in memory that is somebody else's then."""
    cache = Cache("blocks_first", num_blocks=40)
    chunk = staged(allocator, cache, list(range(39, 0, -2)))
    transfer = DeviceBlockTransfer()
    if move == "scatter":
        transfer.gather(cache.kv, [chunk])
    want = cache.chunk_of(chunk.block_ids)
    runs = paged_kv_device._runs

    def with_a_bad_one(*arguments: Any) -> Any:
        yield from runs(*arguments)
        yield torch.empty(2, device=DEVICE), torch.empty(3, device=DEVICE)

    stream = torch.rbln.Stream(device=DEVICE)  # type: ignore[attr-defined]
    monkeypatch.setattr(paged_kv_device, "_runs", with_a_bad_one)
    with (
        torch.rbln.stream(stream),  # type: ignore[attr-defined]
        pytest.raises(RuntimeError),
    ):
        getattr(transfer, move)(cache.kv, [chunk])
    # Reading waits for no other stream.
    assert torch.equal(payload(chunk)[: len(want)], want)
    cache.check()
    chunk.memory_obj.ref_count_down()
    assert allocator.free_slots == allocator.num_slots
