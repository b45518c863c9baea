# SPDX-License-Identifier: Apache-2.0
"""The backend as LMCache uses it: memory, lookups, removal, its contract, its end."""

# Standard
from typing import Any
import asyncio
import inspect
import itertools
import threading

# Third Party
from rds_support import (
    CHUNK_BYTES,
    DAMAGE,
    MakeEngine,
    Storage,
    config_of,
    damage,
    key_of,
    metadata_of,
)
import pytest
import torch

# First Party
from lmcache.v1.storage_backend.abstract_backend import AllocatorBackendInterface
from lmcache_rbln.storage_plugin import rds_backend
from lmcache_rbln.storage_plugin.rds_backend import RDSBackend

pytestmark = pytest.mark.npu


def test_signatures_are_those_of_the_installed_lmcache() -> None:
    for name, method in inspect.getmembers(AllocatorBackendInterface):
        if name.startswith("_") or not callable(method):
            continue
        ours = inspect.signature(getattr(RDSBackend, name))
        theirs = inspect.signature(method)
        assert list(ours.parameters) == list(theirs.parameters), name
        for parameter in theirs.parameters.values():
            assert ours.parameters[parameter.name].default == parameter.default, name
    assert not RDSBackend.__abstractmethods__


def test_a_torch_rbln_without_streams_is_refused(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("torch.rbln.Stream")
    with pytest.raises(ValueError, match="needs streams of the NPU.*torch-rbln 0.12"):
        RDSBackend(config_of(), metadata_of())


def test_a_capacity_below_one_chunk_is_refused(storage: Storage) -> None:
    metadata = metadata_of(kv_shape=(2, 2, 128, 16, 128))
    with pytest.raises(ValueError, match="rds_capacity of 1 MiB holds no chunk"):
        RDSBackend(config_of({"rds_capacity": 1, "rds_buffer_size": 8}), metadata)


@pytest.mark.deferred
@pytest.mark.parametrize("mode", ["overlapped", "synchronous"])
def test_chunks_come_back_byte_by_byte(engine: MakeEngine, mode: str) -> None:
    one = engine({"rds_write_mode": mode})
    assert one.holds(0) == [False]
    assert one.load(0) == [False]
    one.store(0, 1, 2)
    one.store(3)
    assert one.holds(0, 1, 2, 3, 4) == [True] * 4 + [False]
    assert one.load(3, 1, 0, 2) == [True] * 4
    assert one.load(0, 9, 1) == [True, False, False]  # nothing behind a gap
    one.assert_idle()
    assert one.metric("written_chunks") >= 4
    assert one.metric("read_bytes") >= 4 * CHUNK_BYTES


@pytest.mark.deferred
@pytest.mark.parametrize("mode", ["overlapped", "synchronous"])
@pytest.mark.parametrize("made_in_it", [False, True])
def test_threads_in_inference_mode_and_others_share_all_memory(
    engine: MakeEngine, mode: str, made_in_it: bool
) -> None:
    with torch.inference_mode(made_in_it):
        one = engine({"rds_write_mode": mode})
    for number, inference in enumerate((True, False, True)):
        with torch.inference_mode(inference):
            one.store(number)
        with torch.inference_mode(not inference):
            assert one.load(number) == [True]
    one.assert_idle()


def test_twice_the_staging_memory_is_stored_and_restored(engine: MakeEngine) -> None:
    one = engine()
    count = 2 * one.backend.calculate_chunk_budget() + 1
    for number in range(count):  # never waits for a write itself
        one.submit(number)
    one.wait_for_writes()
    for number in range(count):
        assert one.load(number) == [True]
    one.assert_idle()


def test_a_lookup_stops_at_what_staging_memory_holds(
    engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    one = engine()
    slots = one.backend.calculate_chunk_budget()
    numbers = list(range(slots + 2))
    for number in numbers:
        one.store(number)
    keys = [key_of(number) for number in numbers]
    assert one.backend.batched_contains(keys) == slots
    assert all(one.load(*numbers[:slots]))


def test_a_slot_that_is_lost_is_not_promised(engine: MakeEngine) -> None:
    one = engine({"rds_buffer_size": 1})
    slots = one.backend.calculate_chunk_budget()
    one.store(*range(slots))
    obj = one.chunk(slots)
    obj.retire()
    obj.ref_count_down()
    assert one.backend.calculate_chunk_budget() == slots - 1
    keys = [key_of(number) for number in range(slots)]
    assert one.backend.batched_contains(keys) == slots - 1
    assert all(one.load(*range(slots - 1)))


def test_remove_and_clear(engine: MakeEngine) -> None:
    one = engine()
    one.store(0, 1, 2, 3)
    assert one.backend.remove(key_of(0))
    assert not one.backend.remove(key_of(0))
    one.backend.pin(key_of(1))
    assert one.backend.clear() == 2 * 128
    assert one.holds(0, 1, 2, 3) == [False, True, False, False]
    assert one.backend.batched_remove([key_of(1), key_of(2)]) == 1
    one.store(0, 1)
    assert one.load(0, 1) == [True, True]


@pytest.mark.sim
def test_asynchronous_loading(engine: MakeEngine) -> None:
    one = engine()
    one.store(0, 1, 2, 3)
    damage(one, 2, DAMAGE["poison"])
    keys = [key_of(number) for number in range(4)]

    async def load() -> list[Any]:
        assert await one.backend.batched_async_contains("id", keys, True) == 4
        return await one.backend.batched_get_non_blocking("id", keys)

    objs = asyncio.run(load())
    assert len(objs) == 2  # up to the damaged one
    for obj in objs:
        obj.ref_count_down()
    one.assert_idle()


def test_asynchronous_loading_pins_nothing(engine: MakeEngine) -> None:
    one = engine({"rds_max_chunks": 2})
    one.store(0, 1)
    keys = [key_of(0), key_of(1)]

    async def load(found: int) -> list[Any]:
        assert await one.backend.batched_async_contains("id", keys, True) == found
        return await one.backend.batched_get_non_blocking("id", keys[:found])

    for obj in asyncio.run(load(2)):
        obj.ref_count_down()
    one.store(2, 3)  # nothing keeps the others
    assert one.holds(0, 1, 2, 3) == [False, False, True, True]
    assert asyncio.run(load(0)) == []
    one.backend.close()
    assert asyncio.run(load(0)) == []


def test_a_load_that_waits_for_a_thread_at_close_is_a_miss(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rds_backend, "_CLOSE_TIMEOUT_S", 0.0)
    one = engine()
    one.store(0)
    gate, begun = threading.Event(), threading.Barrier(3)

    def wait() -> bool:
        begun.wait(60)
        return gate.wait(60)

    busy = [one.backend._threads.submit(wait) for _ in range(2)]
    begun.wait(60)

    async def load() -> list[Any]:
        keys = [key_of(0)]
        assert await one.backend.batched_async_contains("id", keys, True) == 1
        queued = asyncio.create_task(one.backend.batched_get_non_blocking("id", keys))
        await asyncio.sleep(0)  # it is in the queue now
        one.backend.close()
        return await queued

    try:
        assert asyncio.run(load()) == []
    finally:
        gate.set()
    assert [future.result(timeout=60) for future in busy] == [True, True]


def test_close_gives_back_what_is_pinned_or_written_late(
    engine: MakeEngine, storage: Storage
) -> None:
    storage.use(chunks=3)
    one = engine({"rds_max_chunks": 3})
    one.store(0, 1)
    one.backend.pin(key_of(0))
    [entry] = one.backend._store.index.begin_reads([key_of(1)])
    gate, begun = threading.Event(), threading.Event()
    store, write = one.backend._store, one.backend._store.io.write

    def slow(batch: Any) -> Any:
        begun.set()
        gate.wait(60)
        return write(batch)

    one.backend._store.io.write = slow
    one.submit(2)
    assert begun.wait(60)
    store.close(0)  # it has not ended in time
    gate.set()
    assert store._writer is not None and store._writer.join(60)
    one.backend.close()
    one.backend._store.index.end_read(entry)
    assert one.holds(0, 1, 2) == [False] * 3
    one.assert_idle()
    other = engine({"rds_max_chunks": 3})
    other.store(5, 6, 7)  # all of the NVMe is free
    assert other.holds(5, 6, 7) == [True] * 3


def test_close_while_threads_store_and_restore(engine: MakeEngine) -> None:
    one = engine({"rds_max_chunks": 6})
    backend = one.backend
    closed = threading.Event()
    problems: list[str] = []
    rounds: list[int] = []
    before = one.metric("read_chunks")

    def work(first: int) -> None:
        mine = 0
        try:
            for after in itertools.count():
                numbers = [first + after % 3, first + after % 3 + 1]
                keys = [key_of(number) for number in numbers]
                objs = backend.batched_allocate(
                    one.metadata.get_shapes(), one.metadata.get_dtypes(), 2
                )
                if objs is not None:
                    backend.batched_submit_put_task(keys, objs)
                    for obj in objs:
                        obj.ref_count_down()
                found = backend.batched_contains(keys, pin=True)
                for obj in backend.batched_get_blocking(keys):
                    if obj is not None:
                        obj.ref_count_down()
                for key in keys[:found]:
                    backend.unpin(key)
                mine += 1
                if closed.is_set():
                    break
        except BaseException as error:
            problems.append(repr(error))
        rounds.append(mine)

    threads = [threading.Thread(target=work, args=(10 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    while one.metric("read_chunks") < before + 8 and not problems:
        threading.Event().wait(0.01)
    backend.close()
    closed.set()
    for thread in threads:
        thread.join(timeout=60)
    assert not problems
    assert len(rounds) == 4 and min(rounds) > 0
    one.assert_idle()
    assert backend._store._regions.held_bytes == 0


def test_close_gives_everything_back(engine: MakeEngine, storage: Storage) -> None:
    storage.use(chunks=4)
    one = engine({"rds_max_chunks": 4})
    one.store(0, 1, 2, 3)
    gate = threading.Event()
    one.hold_writes(gate)
    one.submit(4)  # not begun yet: dropped
    gate.set()
    one.backend.close()
    one.backend.close()
    one.assert_idle()
    assert one.submit(5) is None
    one.assert_idle()
    other = engine({"rds_max_chunks": 4})
    other.store(6, 7, 8, 9)
    assert other.holds(6, 7, 8, 9) == [True] * 4


def test_two_workers_on_one_device_never_collide(engine: MakeEngine) -> None:
    ranks = [
        engine(metadata=metadata_of(worker_id=rank, world_size=2)) for rank in (0, 1)
    ]
    for rank, number in itertools.product((0, 1), range(3)):
        ranks[rank].store(number + 100 * rank)
    for rank, number in itertools.product((0, 1), range(3)):
        assert ranks[rank].load(number + 100 * rank) == [True]
        assert ranks[rank].holds(number + 100 * (1 - rank)) == [False]
