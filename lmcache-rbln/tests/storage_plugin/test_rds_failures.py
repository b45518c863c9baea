# SPDX-License-Identifier: Apache-2.0
"""``rds_failure_policy``, and what failures leave behind: nothing."""

# Standard
import gc
import itertools
import logging
import os
import threading

# Third Party
from rds_support import (
    DAMAGE,
    REGION_BYTES,
    MakeEngine,
    Storage,
    damage,
    key_of,
)
import pytest

# First Party
from lmcache_rbln.storage_plugin.rds.device import RDSError

pytestmark = pytest.mark.npu


@pytest.mark.sim
def test_service_recovers_after_single_failures(
    engine: MakeEngine, storage: Storage
) -> None:
    storage.use(faults="eio:write:1,eio:read:3,enospc:alloc:4")
    one = engine()
    one.store(0)
    assert one.holds(0) == [False]
    one.store(0)
    assert one.load(0) == [True]
    failures = one.metric("read_failures")
    assert one.load(0) == [False]
    assert one.metric("read_failures") == failures + 1
    assert one.holds(0) == [False]  # no ghost
    one.store(0, 1, 2)
    assert one.load(0) == [True]
    one.assert_idle()


@pytest.mark.sim
@pytest.mark.parametrize("mode", ["overlapped", "synchronous"])
def test_raise_surfaces_a_failed_write(
    engine: MakeEngine, storage: Storage, mode: str
) -> None:
    storage.use(faults="eio:write:1")
    one = engine({"rds_failure_policy": "raise", "rds_write_mode": mode})
    with pytest.raises(RDSError, match="rds_failure_policy is raise.*Input/output"):
        one.store(0)
        one.store(1)  # an overlapped failure surfaces in the next call
    one.store(2)
    assert one.load(2) == [True]
    one.assert_idle()


@pytest.mark.sim
@pytest.mark.parametrize("mode", ["overlapped", "synchronous"])
def test_a_store_that_raises_leaves_references_to_its_caller(
    engine: MakeEngine, storage: Storage, mode: str
) -> None:
    """LMCache lets go of its own, or not, by its version: never ours, nor twice."""
    storage.use(faults="eio:write:1+sticky")
    one = engine({"rds_failure_policy": "raise", "rds_write_mode": mode})
    backend = one.backend
    objs = [one.chunk(0), one.chunk(1)]
    raised = 0
    for number in range(4):
        keys = [key_of(2 * number), key_of(2 * number + 1)]
        try:
            futures = backend.batched_submit_put_task(keys, list(objs)) or []
        except RDSError:
            raised += 1
        else:
            for future in futures:
                future.result(timeout=30)
        assert [obj.get_ref_count() for obj in objs] == [1, 1]
        assert not any(backend.exists_in_put_tasks(key) for key in keys)
    assert raised == (4 if mode == "synchronous" else 2)  # every second is not begun
    for obj in objs:
        obj.ref_count_down()
    one.assert_idle()


@pytest.mark.sim
def test_raise_surfaces_a_failed_read(engine: MakeEngine, storage: Storage) -> None:
    storage.use(faults="eio:read:1")
    one = engine({"rds_failure_policy": "raise"})
    one.store(0)
    one.store(1)
    with pytest.raises(RDSError, match="RDS read failed"):
        one.load(0)
    one.assert_idle()
    damage(one, 1, DAMAGE["poison"])
    assert one.load(1) == [False]  # damage is a miss, not a failure


@pytest.mark.sim
def test_ten_thousand_failures_leave_nothing_behind(
    engine: MakeEngine, storage: Storage
) -> None:
    storage.use(faults="eio:alloc:p=0.95,eio:write:p=0.5,eio:read:p=0.5")
    one = engine()
    backend = one.backend
    obj = one.chunk(1)

    def failures() -> float:
        return one.metric("write_failures") + one.metric("read_failures")

    def fail(times: int) -> None:
        end = failures() + times
        for number in itertools.cycle(range(3)):
            futures = backend.batched_submit_put_task([key_of(number)], [obj])
            if futures is not None:
                futures[0].result(timeout=10)
            back = backend.get_blocking(key_of(number))
            if back is not None:
                back.ref_count_down()
            if failures() >= end:
                break
        gc.collect()

    def state() -> tuple[int, int, int, int]:
        return (
            len(os.listdir("/proc/self/fd")),
            backend._allocator.free_slots,
            obj.get_ref_count(),
            threading.active_count(),
        )

    logging.disable(logging.ERROR)
    try:
        fail(200)
        before = state()
        fail(10_000)
    finally:
        logging.disable(logging.NOTSET)
    assert state() == before
    assert one.metric("used_bytes") <= 3 * REGION_BYTES
    obj.ref_count_down()
    one.assert_idle()
