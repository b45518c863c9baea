# SPDX-License-Identifier: Apache-2.0
"""Stores and restores: what is written, what is told of it, what goes for space."""

# Standard
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock
import logging
import threading

# Third Party
from rds_support import (
    REGION_BYTES,
    MakeEngine,
    Storage,
    key_of,
    metadata_of,
)
import pytest
import torch

# First Party
from lmcache.v1.memory_management import MemoryFormat
from lmcache_rbln.storage_plugin.rds.staging import StagedMemoryObj

pytestmark = pytest.mark.npu


def test_what_is_stored_or_being_written_is_not_written_again(
    engine: MakeEngine,
) -> None:
    one = engine()
    one.store(1)
    written = one.metric("written_chunks")
    assert one.submit(1) is None
    gate = threading.Event()
    one.hold_writes(gate)
    futures = one.submit(2)
    assert one.backend.exists_in_put_tasks(key_of(2))
    assert one.holds(2) == [False]  # not before its bytes are down
    assert one.submit(2) is None
    gate.set()
    futures[0].result(timeout=10)
    assert one.holds(2) == [True]
    assert not one.backend.exists_in_put_tasks(key_of(2))
    assert one.metric("written_chunks") == written + 1
    one.assert_idle()


def test_what_an_interrupt_kept_from_being_written_can_be_stored(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine()
    with monkeypatch.context() as planted:
        interrupt = MagicMock(side_effect=KeyboardInterrupt)
        planted.setattr(StagedMemoryObj, "ref_count_up", interrupt)
        with pytest.raises(KeyboardInterrupt):
            one.submit(1)
    assert not one.backend.exists_in_put_tasks(key_of(1))
    one.store(1)
    assert one.holds(1) == [True]


def test_a_callback_per_key_even_if_one_fails(engine: MakeEngine) -> None:
    one = engine()
    called = []

    def done(key: Any) -> None:
        called.append(key)
        raise RuntimeError("broken callback")

    objs = [one.chunk(number) for number in (1, 2)]
    futures = one.backend.batched_submit_put_task(
        [key_of(1), key_of(2)], list(objs), on_complete_callback=done
    )
    for obj in objs:
        obj.ref_count_down()
    assert futures is not None
    futures[0].result(timeout=10)
    assert called == [key_of(1), key_of(2)]
    assert one.load(1, 2) == [True, True]


@pytest.mark.parametrize("limit", ["rds_max_chunks", "rds_capacity", "device"])
def test_the_least_recently_used_goes(
    engine: MakeEngine, storage: Storage, limit: str
) -> None:
    if limit == "device":
        storage.use(chunks=7)
    one = engine(
        {
            "rds_max_chunks": {"rds_max_chunks": 7},
            "rds_capacity": {"rds_capacity": 1},
        }.get(limit, {})
    )
    evicted = one.metric("evicted_chunks")
    for number in range(7):
        one.store(number)
    assert one.load(0) == [True]  # used again
    one.store(7, 8)
    assert one.holds(*range(9)) == [True, False, False] + [True] * 6
    assert one.metric("evicted_chunks") - evicted == 2
    assert one.metric("used_bytes") == 7 * REGION_BYTES
    for number in (0, *range(3, 9)):
        assert one.load(number) == [True]


def test_what_a_lookup_pinned_is_not_evicted(engine: MakeEngine) -> None:
    one = engine({"rds_max_chunks": 3})
    one.store(0, 1, 2)
    assert one.backend.batched_contains([key_of(0), key_of(1)], pin=True) == 2
    one.store(3, 4)
    assert one.holds(0, 1) == [True, True]
    assert one.backend.remove(key_of(0), force=False) is False
    unplaced = one.metric("unplaced_chunks")
    assert one.backend.pin(key_of(4)) or one.backend.pin(key_of(3))
    one.store(5)  # nothing may go: it is not stored, and nothing is lost
    assert one.holds(0, 1, 5) == [True, True, False]
    assert one.metric("unplaced_chunks") == unplaced + 1
    for number in (0, 1):
        assert one.backend.unpin(key_of(number))
    one.store(5)
    assert one.holds(5) == [True]
    one.assert_idle()


def test_more_than_fits_stores_the_beginning(engine: MakeEngine) -> None:
    one = engine({"rds_max_chunks": 2})
    unplaced = one.metric("unplaced_chunks")
    one.store(0, 1, 2)
    assert one.holds(0, 1, 2) == [True, True, False]
    assert one.metric("unplaced_chunks") == unplaced + 1
    one.assert_idle()


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Error lines of the backend; LMCache's logger does not propagate."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("lmcache_rbln.storage_plugin.rds.store")
    handler = Collect(logging.ERROR)
    logger.addHandler(handler)
    monkeypatch.setattr(handler, "level", logging.ERROR)
    yield lines
    logger.removeHandler(handler)


@pytest.mark.sim
@pytest.mark.parametrize(
    "faults",
    ["eio:write:1+sticky", "enospc:write:1+sticky", "enospc:alloc:1+sticky", "lost:0"],
)
def test_failing_writes_are_counted_and_told(
    engine: MakeEngine, storage: Storage, faults: str, logged: list[str]
) -> None:
    storage.use(faults=faults)
    one = engine({"rds_failure_policy": "ignore"})
    failures = one.metric("write_failures")
    one.store(0, 1, 2)
    one.store(3)
    assert one.metric("write_failures") - failures == 4
    told = [line.split(":")[0] for line in logged]
    assert told == [
        "RDS batched write failed for 3 keys",
        "RDS batched write failed for 1 keys",
    ]
    assert one.holds(0, 1, 2, 3) == [False] * 4
    one.assert_idle()


@pytest.mark.sim
def test_a_full_device_evicts_and_recovers_when_space_is_back(
    engine: MakeEngine, storage: Storage
) -> None:
    rds = pytest.importorskip("rebel.rds")
    storage.use(chunks=4)
    torch.empty(1, device="rbln:0").cpu()
    hog = rds.Chunk(size=4 * REGION_BYTES, device=0)
    one = engine()
    failures = one.metric("write_failures")
    one.store(0)
    assert one.holds(0) == [False]
    assert one.metric("write_failures") == failures + 1
    hog.close()
    for number in range(6):
        one.store(number)
    assert one.holds(*range(6)) == [False, False, True, True, True, True]
    assert one.metric("write_failures") == failures + 1
    for number in range(2, 6):
        assert one.load(number) == [True]


@pytest.mark.sim
def test_a_write_that_finds_the_device_full_evicts_and_is_tried_again(
    engine: MakeEngine, storage: Storage
) -> None:
    storage.use(faults="enospc:write:5")
    one = engine()
    one.store(0)
    one.store(1)
    one.store(2)
    assert one.holds(0, 1, 2) == [False, True, True]
    assert one.load(1, 2) == [True, True]
    one.assert_idle()


@pytest.mark.sim
def test_where_eviction_makes_no_space_the_rest_stays(
    engine: MakeEngine, storage: Storage
) -> None:
    # Each chunk takes two writes; from the 17th on there is no space.
    storage.use(faults="enospc:write:17+sticky")
    one = engine()
    for number in range(8):
        one.store(number)
    failures = one.metric("write_failures")
    one.store(8)
    assert one.metric("write_failures") == failures + 1
    assert one.holds(*range(9)) == [False] * 3 + [True] * 5 + [False]
    assert one.load(3, 4, 5, 6, 7) == [True] * 5
    one.assert_idle()


@pytest.mark.sim
@pytest.mark.parametrize("where", ["alloc", "write"])
def test_a_prompt_larger_than_the_nvme_keeps_its_beginning(
    engine: MakeEngine, storage: Storage, where: str
) -> None:
    """Full by what this worker stored: that is a limit, and ends no engine."""
    if where == "alloc":
        storage.use(chunks=2)
    else:  # A1: space may be taken by the first write; each chunk takes two
        storage.use(faults="enospc:write:5+sticky")
    one = engine({"rds_failure_policy": "raise"})
    failures, unplaced = one.metric("write_failures"), one.metric("unplaced_chunks")
    one.store(0, 1)
    one.backend.batched_contains([key_of(number) for number in range(4)])
    one.store(2)
    one.store(3)
    assert one.load(0, 1) == [True, True]
    assert one.holds(0, 1, 2, 3) == [True, True, False, False]
    assert one.metric("write_failures") == failures
    assert one.metric("unplaced_chunks") == unplaced + 2
    one.assert_idle()


@pytest.mark.sim
def test_of_a_batch_too_large_for_the_nvme_the_beginning_is_written(
    engine: MakeEngine, storage: Storage
) -> None:
    # The third payload finds no space, then the second, and one is written.
    storage.use(faults="enospc:write:3,enospc:write:5")
    one = engine({"rds_failure_policy": "raise"})
    failures, unplaced = one.metric("write_failures"), one.metric("unplaced_chunks")
    one.store(0, 1, 2)
    assert one.load(0) == [True]
    assert one.holds(0, 1, 2) == [True, False, False]
    assert one.metric("write_failures") == failures
    assert one.metric("unplaced_chunks") == unplaced + 2
    one.assert_idle()


def test_a_chunk_of_foreign_memory_claims_nothing(engine: MakeEngine) -> None:
    one = engine()
    obj = one.chunk(0)
    foreign: Any = object()
    with pytest.raises(TypeError, match="its own staging memory"):
        one.backend.batched_submit_put_task([key_of(0), key_of(1)], [obj, foreign])
    assert obj.get_ref_count() == 1
    obj.ref_count_down()
    one.store(0)
    assert one.load(0) == [True]
    one.assert_idle()


@pytest.mark.parametrize("mode", ["overlapped", "synchronous"])
def test_an_unexpected_error_is_a_failed_write_and_releases_once(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    one = engine({"rds_write_mode": mode, "rds_max_chunks": 2})
    failures = one.metric("write_failures")

    def broken(batch: Any) -> Any:
        raise ArithmeticError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(one.backend._store.index, "evict", broken)
        one.store(0, 1, 2)  # two find space
        planted.undo()
        assert one.holds(0, 1, 2) == [True, True, False]
        one.backend.clear()
        planted.setattr(one.backend._store.io, "write", broken)
        one.store(2)
    assert one.metric("write_failures") == failures + 2
    one.assert_idle()
    one.store(0, 1)
    assert one.load(0, 1) == [True, True]
    assert one.metric("used_bytes") == 2 * REGION_BYTES
    one.assert_idle()


@pytest.mark.parametrize("mode", ["overlapped", "synchronous"])
def test_a_key_stored_by_many_threads_is_written_once(
    engine: MakeEngine, mode: str
) -> None:
    one = engine({"rds_write_mode": mode})
    written = one.metric("written_chunks")
    start = threading.Barrier(8)

    def store() -> None:
        start.wait(60)
        one.store(0, 1)

    threads = [threading.Thread(target=store) for _ in range(7)]
    for thread in threads:
        thread.start()
    start.wait(60)
    for thread in threads:
        thread.join(timeout=60)
    one.wait_for_writes()
    assert one.metric("written_chunks") == written + 2
    assert one.load(0, 1) == [True, True]
    assert one.metric("used_bytes") == 2 * REGION_BYTES
    one.assert_idle()


# ---- restores -----------------------------------------------------------------------
def test_a_short_chunk_keeps_its_shape(engine: MakeEngine) -> None:
    one = engine()
    shapes = [torch.Size([2, 2, 50, 128])]
    obj = one.backend.allocate(shapes, [torch.bfloat16], None)
    assert obj is not None and obj.tensor is not None
    data = torch.randint(0, 100, shapes[0]).to(torch.bfloat16)
    obj.tensor.copy_(data)
    futures = one.backend.batched_submit_put_task([key_of(1)], [obj])
    obj.ref_count_down()
    assert futures is not None
    futures[0].result(timeout=10)
    back = one.backend.get_blocking(key_of(1))
    assert back is not None and back.tensor is not None
    assert back.get_shape() == shapes[0]
    assert torch.equal(back.tensor.cpu(), data)
    back.ref_count_down()
    one.assert_idle()


def test_mla_format_is_kept(engine: MakeEngine) -> None:
    metadata = metadata_of(kv_shape=(2, 1, 128, 1, 64), use_mla=True)
    one = engine(metadata=metadata)
    obj = one.backend.allocate(
        metadata.get_shapes(), metadata.get_dtypes(), MemoryFormat.KV_MLA_FMT
    )
    assert obj is not None
    futures = one.backend.batched_submit_put_task([key_of(1)], [obj])
    obj.ref_count_down()
    assert futures is not None
    futures[0].result(timeout=10)
    back = one.backend.get_blocking(key_of(1))
    assert back is not None
    assert back.get_memory_format() == MemoryFormat.KV_MLA_FMT
    back.ref_count_down()


def test_staging_memory_that_stays_taken_ends_the_wait(engine: MakeEngine) -> None:
    one = engine({"rds_wait_timeout": 0.05})
    one.store(0, 1)
    slots = one.backend.calculate_chunk_budget()
    held = [one.chunk(10 + number) for number in range(slots - 1)]
    failures = one.metric("staging_failures")
    assert one.load(0, 1) == [True, False]
    last = one.chunk(99)
    shapes, dtypes = one.metadata.get_shapes(), one.metadata.get_dtypes()
    assert one.backend.allocate(shapes, dtypes) is None  # at once: nothing is written
    assert one.metric("staging_failures") == failures + 2
    for obj in [*held, last]:
        obj.ref_count_down()
    assert one.load(0, 1) == [True, True]
    one.assert_idle()
