# SPDX-License-Identifier: Apache-2.0
"""Stores beside the engine when their server stalls, restarts or stays away."""

# Standard
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock
import threading

# Third Party
from kv_reference import as_bytes, assert_same_bytes, move
from restores import CHUNK, SOON_S, TO, WORKERS, Gate, Server, Worker
from restores import answered, name_of
import pytest
import torch

# First Party
from lmcache.v1.multiprocess.custom_types import RegisterEngineDrivenContextResponse
from lmcache.v1.multiprocess.transfer_context import async_engine_driven
from lmcache.v1.multiprocess.transfer_context.shm import ABORT_STORE
from lmcache.v1.platform.devices.rbln import staging
from lmcache.v1.platform.devices.rbln.block_transfer import StillInFlightError

pytestmark = [pytest.mark.npu, pytest.mark.deferred]
pytest_plugins = ["rbln_sim.pytest_plugin"]

NOTHING: tuple[set[str], set[str], set[int]] = (set(), set(), set())
STORED: tuple[set[str], set[str], set[int]] = ({"a"}, set(), set())
STORE_THREADS = async_engine_driven.DEFAULT_ENGINE_DRIVEN_COMMIT_WORKERS


@pytest.fixture(params=WORKERS, ids=name_of)
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    made = Worker(*request.param)
    yield made
    made.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch, async_engine_driven, "gather_paged_kv_to_cpu")
    yield made
    # What failed must not hold the end up.
    made.open()


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("lmcache_")]


def aborts(worker: Worker, count: int) -> list[bytes]:
    """What gives slots back; where chunks are sent there are none."""
    return [ABORT_STORE] * count if worker.shm else []


def assert_stores(worker: Worker) -> None:
    """A store goes to the server, byte by byte."""
    worker.server.answers = True
    assert worker.store("stores").result(SOON_S) is True
    wanted = [torch.zeros_like(chunk) for chunk in worker.server.chunks]
    move(worker.case, True, worker.before, wanted, TO, CHUNK)
    assert_same_bytes(worker.server.stored(), wanted)


def lose(worker: Worker) -> None:
    worker.adapter._health_event.clear()


def come_back(worker: Worker) -> None:
    """As the heartbeats do when a server is back."""
    assert worker.adapter._reregister_kv_caches_callback()
    worker.adapter._health_event.set()


def test_a_server_that_stalls_publishes_nothing_of_the_next_owner(
    worker: Worker,
) -> None:
    worker.server.answers = False
    before = [as_bytes(chunk) for chunk in worker.server.chunks]
    store = worker.store("a")
    assert worker.server.asked.acquire(timeout=SOON_S)
    lose(worker)
    # Nothing reads the blocks, nor will: they are others' from here on.
    assert worker.reports("a") == STORED
    worker.server.waiting[0].set_result(worker.server.slots())
    come_back(worker)
    assert store.result(SOON_S) is False
    assert worker.server.commits == aborts(worker, 1)
    if worker.shm:
        for chunk, wanted in zip(worker.server.stored(), before, strict=True):
            assert torch.equal(as_bytes(chunk), wanted)
    assert worker.reports("a") == NOTHING
    assert_stores(worker)


def test_blocks_that_are_read_are_not_given_away(worker: Worker, gate: Gate) -> None:
    store = worker.store("a")
    gate.await_writer()
    lose(worker)
    for _ in range(3):
        assert worker.reports("a") == NOTHING
    gate.open()
    assert store.result(SOON_S) is False
    assert worker.reports() == STORED
    come_back(worker)
    assert worker.server.commits == aborts(worker, 1)
    assert_stores(worker)


def test_what_copies_may_still_write_to_is_nobody_elses(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the slots of the server, nor the memory of what is sent."""
    written: list[int] = []

    def fail(*_: Any, out: list[torch.Tensor], **__: Any) -> None:
        written.extend(chunk.data_ptr() for chunk in out)
        raise StillInFlightError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(async_engine_driven, "gather_paged_kv_to_cpu", fail)
        planted.setattr(staging.StagingArena, "in_use", lambda _: (0, 1))
        assert worker.store("a").result(SOON_S) is False
        context: Any = worker.adapter.transfer_ctx
    lose(worker)
    assert worker.reports("a") == STORED
    come_back(worker)
    assert worker.server.commits == []
    assert len(written) == 2
    kept = [chunk for pool in context._staging_pool.values() for chunk in pool]
    assert not {chunk.data_ptr() for chunk in kept} & set(written)


def test_slots_whose_answer_is_lost_are_given_back(worker: Worker) -> None:
    worker.server.answers = False
    store = worker.store("a")
    assert worker.server.asked.acquire(timeout=SOON_S)
    worker.server.waiting[0].set_exception(TimeoutError("the connection is lost"))
    # What is sent with its bytes needs no slots.
    assert store.result(SOON_S) is not worker.shm
    assert (ABORT_STORE in worker.server.commits) is worker.shm
    assert worker.reports("a") == STORED
    assert_stores(worker)


def test_nothing_is_submitted_to_a_context_that_is_not_registered_yet(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heartbeat replaces it while the engine submits."""
    adapter = worker.adapter
    unregistered = MagicMock()

    def replaced(*args: Any, **kwargs: Any) -> Any:
        context: Any = adapter.transfer_ctx
        if context is not unregistered:
            lose(worker)
            context.give_up()
            adapter.transfer_ctx = unregistered
        return create(*args, **kwargs)

    create = adapter._create_key
    with monkeypatch.context() as planted:
        planted.setattr(adapter, "_create_key", replaced)
        assert worker.store("a").result(SOON_S) is False
    come_back(worker)
    with monkeypatch.context() as planted:
        planted.setattr(adapter, "_create_key", replaced)
        assert worker.submit("b").result(SOON_S) is False
    come_back(worker)
    unregistered.submit_store.assert_not_called()
    unregistered.submit_retrieve.assert_not_called()


def test_a_new_server_gets_no_slots_that_nothing_was_written_to(
    worker: Worker,
) -> None:
    """Requests that the old server did not answer reach the new one."""
    worker.server.answers = False
    stores = [worker.store(str(i)) for i in range(STORE_THREADS + 2)]
    for _ in range(STORE_THREADS):
        assert worker.server.asked.acquire(timeout=SOON_S)
    new = Server(worker.case, worker.shm)
    size = 2 * new.chunks[0].nbytes if worker.shm else 0
    name = new._segment.name if new._segment is not None else ""
    client: Any = worker.server.client
    client.register_kv_cache_engine_driven_context.side_effect = lambda *_: answered(
        RegisterEngineDrivenContextResponse(shm_name=name, pool_size=size)
    )
    old = worker.server.waiting
    come_back(worker)
    for future in old:
        future.set_result(new.slots())
    assert [store.result(SOON_S) for store in stores] == [False] * len(stores)
    # What waited for a thread may have got one, and asked.
    asked = worker.server.calls.count("prepare_store")
    assert worker.server.commits == aborts(worker, asked)
    new.client, new.commits = client, worker.server.commits
    worker.server.close()
    worker.server = new
    client.prepare_store.side_effect = lambda *_: answered(new.slots())
    assert_stores(worker)


@pytest.mark.parametrize("again", [False, True])
def test_a_preemption_waits_for_what_reads_from_a_lost_server_s_blocks(
    again: bool, worker: Worker, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before another server is there, and after."""
    store = worker.store("a")
    gate.await_writer()
    lose(worker)
    context = worker.adapter.transfer_ctx
    waiter, name = (context, "_drain") if again else (store, "wait")
    waits = getattr(waiter, name)

    def opens(*args: Any) -> Any:
        gate.open()
        return waits(*args)

    monkeypatch.setattr(waiter, name, opens)
    if again:
        come_back(worker)
    worker.adapter.handle_preemptions(True)
    assert store.query()
    assert store.result() is False


def test_a_preemption_does_not_wait_for_a_lost_server(worker: Worker) -> None:
    worker.server.answers = False
    store = worker.store("a")
    assert worker.server.asked.acquire(timeout=SOON_S)
    lose(worker)
    worker.adapter.handle_preemptions(True)
    assert store.result(SOON_S) is False
    assert worker.reports("a") == STORED


def test_a_context_that_is_replaced_leaves_nothing(worker: Worker) -> None:
    """Not even what waits for the lost server."""
    worker.server.answers = False
    transfers = [worker.store("stores"), worker.submit("loads")]
    for _ in transfers:
        assert worker.server.asked.acquire(timeout=SOON_S)
    assert len(threads()) >= 2
    come_back(worker)
    assert not threads()
    assert [transfer.result(SOON_S) for transfer in transfers] == [False, False]
    assert "commit_retrieve" in worker.server.calls
    assert_stores(worker)
