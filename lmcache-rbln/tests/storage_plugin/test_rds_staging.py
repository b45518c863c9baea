# SPDX-License-Identifier: Apache-2.0
"""Device staging memory: bounded, accounted for, given back exactly once."""

# Standard
from concurrent.futures import ThreadPoolExecutor
from typing import Any
import gc
import threading
import time

# Third Party
import pytest
import torch

# First Party
from lmcache.v1.memory_management import MemoryFormat
from lmcache_rbln.storage_plugin.rds.device import RDSDevice, RDSError
from lmcache_rbln.storage_plugin.rds.staging import StagingAllocator

pytestmark = pytest.mark.npu

SHAPES = [torch.Size([2, 2, 128, 128])]
DTYPES = [torch.bfloat16]
MIB = 1 << 20


@pytest.fixture
def device(storage: Any) -> RDSDevice:
    return RDSDevice(torch.device("rbln:0"), numa_node=0)


@pytest.fixture
def allocator(device: RDSDevice) -> StagingAllocator:
    return StagingAllocator(device, 1 * MIB, 2 * 128 << 10)


def test_the_buffer_holds_whole_slots_with_their_headers(
    allocator: StagingAllocator,
) -> None:
    # 256 KiB and 4 KiB each: three fit into 1 MiB.
    assert allocator.num_slots == allocator.free_slots == 3
    assert allocator.slot_bytes == 256 << 10
    objs = [allocator.allocate(SHAPES, DTYPES) for _ in range(3)]
    assert allocator.allocate(SHAPES, DTYPES) is None
    assert len({obj.slot.payload.data_ptr() for obj in objs if obj}) == 3
    for obj in objs:
        assert obj is not None
        assert obj.tensor is not None
        assert obj.tensor.device == torch.device("rbln:0")
        assert obj.tensor.shape == SHAPES[0]
        assert obj.get_memory_format() == MemoryFormat.KV_2LTD
        assert allocator.memcheck()
        obj.ref_count_down()
    assert allocator.free_slots == 3
    assert allocator.memcheck()


def test_a_buffer_without_a_chunk_says_what_is_needed(device: RDSDevice) -> None:
    with pytest.raises(ValueError, match=r"1 MiB holds no chunk of 5242880 .* 6 or"):
        StagingAllocator(device, MIB, 5 * MIB)


@pytest.mark.sim
def test_a_buffer_that_does_not_fit_says_so(device: RDSDevice) -> None:
    with pytest.raises(RDSError, match=r"rds_buffer_size of \d+ MiB does not fit"):
        StagingAllocator(device, 64 << 30, 8 << 30)


def test_fmt_none_single_shapes_and_oversize(allocator: StagingAllocator) -> None:
    obj = allocator.allocate(SHAPES[0], DTYPES[0], None)
    assert obj is not None
    assert obj.get_memory_format() == MemoryFormat.KV_2LTD
    obj.ref_count_down()
    assert allocator.allocate(torch.Size([2, 2, 1024, 128]), torch.bfloat16) is None


def test_a_second_free_and_a_lost_object_are_harmless(
    allocator: StagingAllocator,
) -> None:
    obj = allocator.allocate(SHAPES, DTYPES)
    assert obj is not None
    allocator.free(obj)
    allocator.free(obj)
    obj.ref_count_down()
    assert allocator.free_slots == 3
    lost = allocator.allocate(SHAPES, DTYPES)
    assert lost is not None
    del lost, obj
    gc.collect()
    assert allocator.free_slots == 3
    assert allocator.memcheck()
    with pytest.raises(TypeError):
        allocator.free(object())  # type: ignore[arg-type]


def test_batched_is_all_or_nothing(allocator: StagingAllocator) -> None:
    assert allocator.batched_allocate(SHAPES, DTYPES, 4) is None
    objs = allocator.batched_allocate(SHAPES, DTYPES, 3)
    assert objs is not None
    allocator.batched_free(objs)
    assert allocator.free_slots == 3


def test_a_wait_ends_when_memory_comes_back(allocator: StagingAllocator) -> None:
    objs = allocator.batched_allocate(SHAPES, DTYPES, 3)
    assert objs is not None
    started = threading.Event()

    def left() -> float:
        started.set()
        return 5.0

    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(allocator.allocate_within, SHAPES, DTYPES, None, left)
        assert started.wait(5)
        objs[0].ref_count_down()
        again = late.result(timeout=5)
    assert again is not None
    assert (
        allocator.allocate_within(SHAPES, DTYPES, None, iter((0.05, 0)).__next__)
        is None
    )
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(
            allocator.allocate_within, SHAPES, DTYPES, None, lambda: 60.0
        )
        time.sleep(0.01)
        allocator.close()
        assert late.result(timeout=5) is None


def test_a_retired_slot_is_never_used_again(allocator: StagingAllocator) -> None:
    obj = allocator.allocate(SHAPES, DTYPES)
    assert obj is not None
    number = obj.slot.number
    obj.retire()
    obj.ref_count_down()
    assert allocator.free_slots == 2
    objs = allocator.batched_allocate(SHAPES, DTYPES, 2)
    assert objs is not None
    assert number not in [other.metadata.address for other in objs]
    assert allocator.allocate(SHAPES, DTYPES) is None
    assert allocator.memcheck()
    for other in objs:
        other.ref_count_down()
    assert allocator.memcheck()
