# SPDX-License-Identifier: Apache-2.0
"""Staging memory of a process: bounded, and given back by threads that end."""

# Future
from __future__ import annotations

# Standard
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
import threading
import time

# Third Party
from kv_reference import (
    LAYOUTS,
    Case,
    Layout,
    check_both_directions,
    random_bits,
    transfer,
    upload,
)
import pytest
import torch

# First Party
from lmcache.v1.platform.devices.rbln import ring, staging
from lmcache.v1.platform.devices.rbln.staging import (
    BUFFER_BYTES,
    DEFAULT_STAGING_MIB,
    RING_BUFFERS,
    StagingPool,
)

pytestmark = [pytest.mark.npu]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Give the process a new pool of the default size; the buffers that it makes."""
    buffers: list[torch.Tensor] = []
    real = ring._make_buffer

    def make_buffer() -> torch.Tensor:
        buffers.append(real())
        return buffers[-1]

    capacity = (DEFAULT_STAGING_MIB << 20) // BUFFER_BYTES
    monkeypatch.setattr(ring, "_process_pool", StagingPool(capacity, make_buffer))
    return buffers


def held(buffers: list[torch.Tensor]) -> int:
    return sum(buffer.nbytes for buffer in buffers)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_thread_holds_its_ring(made: list[torch.Tensor], layout: Layout) -> None:
    case = Case(layout, 8, 3, 4, 256, 64, torch.float16)
    layers = [
        upload(random_bits(case.layer_shape, case.dtype, i), "rbln:0") for i in range(8)
    ]
    chunk = torch.empty(case.chunk_shape(512), dtype=case.dtype)
    for _ in range(3):
        transfer(case, True, layers, [chunk], [2, 0], 512)
        transfer(case, False, layers, [chunk], [0, 1], 512)
    assert held(made) == RING_BUFFERS * BUFFER_BYTES


def test_no_more_transfers_stage_at_a_time_than_are_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "max_transfers", lambda: 2)
    monkeypatch.setattr(ring, "_process_pool", None)
    pool = ring._pool()
    pool.close()
    case = Case("kv_first", 2, 3, 2, 16, 32, torch.float16)
    with ThreadPoolExecutor(1) as executor:
        with pool.borrow(1), pool.borrow(1):
            result = executor.submit(
                check_both_directions, case, "rbln:0", [2, 0, 1], 3
            )
            while not pool._line:
                assert not result.done()
                time.sleep(0.001)
            assert not result.done()
            assert pool.lent() == 2
        result.result(timeout=60)
    assert pool.lent() == 0
    pool.close()


def test_eight_threads_stay_within_the_bound_and_leave_nothing_behind(
    made: list[torch.Tensor],
) -> None:
    case = Case("kv_first", 4, 9, 4, 256, 64, torch.float16)
    layers = [
        upload(random_bits(case.layer_shape, case.dtype, i), "rbln:0") for i in range(4)
    ]
    start = threading.Barrier(8)
    failed: list[int] = []

    def work(thread: int) -> None:
        chunk = torch.empty(case.chunk_shape(256), dtype=case.dtype)
        start.wait()
        with torch.rbln.stream(torch.rbln.Stream("rbln:0")):
            for _ in range(3):
                transfer(case, True, layers, [chunk], [thread], 256)
        if thread % 2:
            # Half of the threads die in the middle of a transfer.
            failed.append(thread)
            with suppress(SystemExit), ring.Ring(torch.device("rbln:0")):
                raise SystemExit

    for _ in range(3):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        start.reset()
    assert len(failed) == 12
    assert held(made) <= DEFAULT_STAGING_MIB << 20
    # All of it is there for whoever comes next; nothing was lost with a thread.
    capacity = (DEFAULT_STAGING_MIB << 20) // BUFFER_BYTES
    with ring._pool().borrow(capacity) as loan:
        assert len({buffer.data_ptr() for buffer in loan.buffers}) == capacity
    assert held(made) == DEFAULT_STAGING_MIB << 20
