# SPDX-License-Identifier: Apache-2.0
"""The backend as LMCache uses it: bytes, eviction, damage, failures, contracts."""

# Standard
from collections.abc import Callable, Iterator
from typing import Any
import asyncio
import gc
import inspect
import itertools
import logging
import os
import random
import threading

# Third Party
from rds_support import (
    CHUNK_BYTES,
    REGION_BYTES,
    Engine,
    Storage,
    config_of,
    damage,
    key_of,
    metadata_of,
)
import pytest
import torch

# First Party
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import AllocatorBackendInterface
from lmcache.v1.storage_backend.storage_manager import StorageManager
from lmcache_rbln.storage_plugin.rds_backend import RDSBackend
from lmcache_rbln.storage_plugin.rds_device import RDSError

pytestmark = pytest.mark.npu
MakeEngine = Callable[..., Engine]
Change = Callable[[bytearray], None]


# ---- store and restore --------------------------------------------------------------


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
def test_twice_the_staging_memory_is_stored_and_restored(engine: MakeEngine) -> None:
    one = engine()
    count = 2 * one.backend.calculate_chunk_budget() + 1
    for number in range(count):  # never waits for a write itself
        one.submit(number)
    one.backend._writer._thread.submit(lambda: None).result(timeout=10)
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


def test_what_is_stored_or_being_written_is_not_written_again(
    engine: MakeEngine,
) -> None:
    one = engine()
    one.store(1)
    written = one.metric("written_chunks")
    assert one.submit(1) is None
    gate = threading.Event()
    one.backend._writer._thread.submit(gate.wait)
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


# ---- eviction -----------------------------------------------------------------------


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
    failures = one.metric("write_failures")
    assert one.backend.pin(key_of(4)) or one.backend.pin(key_of(3))
    one.store(5)  # nothing may go: it is not stored, and nothing is lost
    assert one.holds(0, 1, 5) == [True, True, False]
    assert one.metric("write_failures") == failures + 1
    for number in (0, 1):
        assert one.backend.unpin(key_of(number))
    one.store(5)
    assert one.holds(5) == [True]
    one.assert_idle()


def test_more_than_fits_stores_the_beginning(engine: MakeEngine) -> None:
    one = engine({"rds_max_chunks": 2})
    failures = one.metric("write_failures")
    one.store(0, 1, 2)
    assert one.holds(0, 1, 2) == [True, True, False]
    assert one.metric("write_failures") == failures + 1
    one.assert_idle()


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


# ---- damage -------------------------------------------------------------------------


def _overwrite(first: int, last: int, value: int = 0) -> Change:
    def change(data: bytearray) -> None:
        data[first:last] = bytes([value]) * (last - first)

    return change


def _put(place: slice, value: bytes) -> Change:
    def change(data: bytearray) -> None:
        data[place] = value

    return change


def _flip(bit: int) -> Change:
    def change(data: bytearray) -> None:
        data[bit // 8] ^= 1 << bit % 8

    return change


DAMAGE = {
    "all zero": _overwrite(0, REGION_BYTES),
    "header zero": _overwrite(0, 4096),
    "payload zero": _overwrite(4096, REGION_BYTES),
    "second half missing": _overwrite(REGION_BYTES // 2, REGION_BYTES),
    "last sector missing": _overwrite(REGION_BYTES - 4096, REGION_BYTES),
    "poison": _overwrite(0, REGION_BYTES, 0xA5),
    **{
        f"bit {bit}": _flip(bit)
        for bit in (
            0,
            8 * 4096 - 1,
            8 * 4096,
            8 * REGION_BYTES - 1,
            *random.Random(0).sample(range(8 * REGION_BYTES), 12),
        )
    },
}


@pytest.mark.sim
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_chunk_is_a_miss_and_is_dropped(
    engine: MakeEngine, kind: str
) -> None:
    one = engine()
    one.store(0, 1)
    rejected = one.metric("rejected_chunks")
    damage(one, 0, DAMAGE[kind])
    assert one.load(0) == [False]
    assert one.metric("rejected_chunks") == rejected + 1
    assert one.holds(0, 1) == [False, True]
    assert one.load(1) == [True]
    one.store(0)
    assert one.load(0) == [True]
    one.assert_idle()


@pytest.mark.sim
@pytest.mark.parametrize("part", ["whole", "header", "payload"])
def test_swapped_chunks_are_misses(engine: MakeEngine, part: str) -> None:
    one = engine()
    one.store(0, 1, 2)
    places = {"whole": slice(None), "header": slice(4096), "payload": slice(4096, None)}
    held: list[bytes] = []
    for number in (0, 1):
        damage(one, number, lambda data: held.append(bytes(data[places[part]])))
    for number in (0, 1):
        other = held[1 - number]
        damage(one, number, _put(places[part], other))
    assert one.load(0) == [False]
    assert one.load(1) == [False]
    assert one.load(2) == [True]
    one.assert_idle()


@pytest.mark.sim
def test_an_old_chunk_of_the_same_key_is_a_miss(engine: MakeEngine) -> None:
    """A write that the NVMe lost although it reported success."""
    one = engine({"rds_max_chunks": 1})
    one.store(0)
    old: list[bytes] = []
    damage(one, 0, lambda data: old.append(bytes(data)))
    one.backend.remove(key_of(0))
    obj = one.chunk(5)  # other bytes under the same key
    futures = one.backend.batched_submit_put_task([key_of(0)], [obj])
    obj.ref_count_down()
    assert futures is not None
    futures[0].result(timeout=10)
    damage(one, 0, _put(slice(None), old[0]))
    assert one.backend.get_blocking(key_of(0)) is None


@pytest.mark.sim
@pytest.mark.parametrize("position", [1, 2, 3, 4])
def test_a_torn_write_is_a_miss(
    engine: MakeEngine, storage: Storage, position: int
) -> None:
    storage.use(faults=f"torn:write:{position}")
    one = engine()
    one.store(0)
    one.store(1)
    # A header is one sector: torn is not written at all.
    came = [one.load(0)[0], one.load(1)[0]]
    assert came == [position not in (1, 2), position not in (3, 4)]
    one.assert_idle()


@pytest.mark.sim
def test_checksum_header_finds_headers_alone(
    engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    one = engine({"rds_checksum": "header"})
    one.store(0, 1)
    assert one.load(0) == [True]
    damage(one, 0, DAMAGE["header zero"])
    damage(one, 1, DAMAGE["last sector missing"])
    assert one.load(0) == [False]
    obj = one.backend.get_blocking(key_of(1))
    assert obj is not None  # what the setting gives up
    obj.ref_count_down()


# ---- failures -----------------------------------------------------------------------


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Error lines of the backend; LMCache's logger does not propagate."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("lmcache_rbln.storage_plugin.rds_writer")
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


# ---- contracts with LMCache ---------------------------------------------------------


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


PLUGIN = {
    "storage_plugin.RDSBackend.module_path": "lmcache_rbln.storage_plugin.rds_backend",
    "storage_plugin.RDSBackend.class_name": "RDSBackend",
}


def test_lmcache_works_without_a_cpu_tier(storage: Storage) -> None:
    """What ends with a KeyError in LMCache alone: the documented settings."""
    config = config_of(PLUGIN, storage_plugins=["RDSBackend"])
    manager = StorageManager(config, metadata_of(), EventManager())
    try:
        assert list(manager.storage_backends) == ["RDSBackend"]
        backend = manager.allocator_backend
        assert isinstance(backend, RDSBackend)
        one = Engine(backend)
        objs = [one.chunk(number) for number in (0, 1)]
        keys = [key_of(0), key_of(1)]
        manager.batched_put(keys, list(objs))
        backend._writer._thread.submit(lambda: None).result(timeout=10)
        assert [obj.get_ref_count() for obj in objs] == [0, 0]
        one.assert_idle()
        assert manager.batched_contains([*keys, key_of(2)], pin=True) == (
            2,
            {"RDSBackend": keys},
        )
        back = manager.batched_get(keys, location="RDSBackend")
        for obj in back:
            assert obj is not None
            obj.ref_count_down()
        manager.batched_unpin(keys, ["RDSBackend"])
        assert manager.memcheck()
        assert manager.clear() == 256
    finally:
        manager.close()
    assert not manager.thread.is_alive()


def test_a_plugin_that_fails_is_named(storage: Storage) -> None:
    config = config_of(PLUGIN | {"rds_bufer_size": 1}, storage_plugins=["RDSBackend"])
    managers: list[StorageManager] = []
    try:
        with pytest.raises(RuntimeError, match="no storage plugin was created"):
            managers.append(StorageManager(config, metadata_of(), EventManager()))
    finally:
        # LMCache leaves its thread behind when it fails in its constructor.
        for thread in threading.enumerate():
            if thread.name == "storage-manager-event-loop":
                loop = thread._args[0]  # type: ignore[attr-defined]
                loop.call_soon_threadsafe(loop.stop)
                thread.join(timeout=10)
    assert not managers


@pytest.mark.parametrize(
    ("config", "metadata", "why"),
    [
        ({"local_cpu": True}, {}, "LMCACHE_LOCAL_CPU=False"),
        ({"use_layerwise": True}, {}, "LMCACHE_USE_LAYERWISE=False"),
        ({}, {"role": "scheduler"}, "enable_scheduler_bypass_lookup"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    storage: Storage, config: Any, metadata: Any, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        RDSBackend(config_of(**config), metadata_of(**metadata))


def test_other_devices_are_refused(storage: Storage) -> None:
    with pytest.raises(ValueError, match="needs an RBLN NPU, LMCache runs on cpu"):
        RDSBackend(config_of(), metadata_of(), dst_device="cpu")


def test_a_capacity_below_one_chunk_is_refused(storage: Storage) -> None:
    metadata = metadata_of(kv_shape=(2, 2, 128, 16, 128))
    with pytest.raises(ValueError, match="rds_capacity of 1 MiB holds no chunk"):
        RDSBackend(config_of({"rds_capacity": 1, "rds_buffer_size": 8}), metadata)


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
    future = one.backend.get_non_blocking(key_of(0))
    assert future is not None
    future.result(timeout=10).ref_count_down()
    assert one.backend.get_non_blocking(key_of(2)) is None


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


def test_close_gives_everything_back(engine: MakeEngine, storage: Storage) -> None:
    storage.use(chunks=4)
    one = engine({"rds_max_chunks": 4})
    one.store(0, 1, 2, 3)
    gate = threading.Event()
    one.backend._writer._thread.submit(gate.wait)
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
