# SPDX-License-Identifier: Apache-2.0
"""Restores beside the engine: LMCache's worker adapter, and a server of the test's."""

# Standard
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock
import threading

# Third Party
from kv_reference import as_bytes
from restores import SOON_S, TO, WORKERS, Gate, Worker, answered, name_of
import pytest
import torch

# First Party
from lmcache.v1.multiprocess.custom_types import PrepareRetrieveResponse
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.platform.devices.rbln import transfer_context
from lmcache.v1.platform.devices.rbln.block_transfer import StillInFlightError

pytestmark = [pytest.mark.npu, pytest.mark.deferred]
pytest_plugins = ["rbln_sim.pytest_plugin"]

Reports = tuple[set[str], set[str], set[int]]
NOTHING: Reports = (set(), set(), set())
LOADED: Reports = (set(), {"a"}, set())
FAILED: Reports = (set(), {"a"}, set(TO))
OTHERS = [1, 2, 4, 5]
SUPPORT = Path(__file__).parents[3] / "support"


@pytest.fixture(params=WORKERS, ids=name_of)
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    made = Worker(*request.param)
    yield made
    made.close()
    assert not threads(), "restores go on after the end"


@pytest.fixture
def small() -> Iterator[Worker]:
    """Where the layout and the transport make no difference."""
    made = Worker("blocks_first", shm=False)
    yield made
    made.close()
    assert not threads(), "restores go on after the end"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    # What failed must not hold the end up.
    made.open()


def threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("lmcache_rbln_restore")]


def test_the_engine_goes_on_while_bytes_come(worker: Worker) -> None:
    worker.server.answers = False
    loads = worker.submit("a")
    assert worker.server.asked.acquire(timeout=SOON_S)
    assert worker.reports() == NOTHING
    worker.assert_restored()
    worker.server.waiting[0].set_result(worker.server.response())
    assert loads.result(SOON_S) is True
    assert worker.server.calls[-2:] == ["prepare_retrieve", "commit_retrieve"]
    assert worker.reports() == LOADED
    assert worker.reports() == NOTHING
    worker.assert_restored(TO)


def test_two_loads_of_one_prefix(worker: Worker) -> None:
    loads = [worker.submit("a"), worker.submit("b", OTHERS)]
    assert [load.result(SOON_S) for load in loads] == [True, True]
    assert worker.reports() == (set(), {"a", "b"}, set())
    assert worker.server.calls.count("commit_retrieve") == 2
    worker.assert_restored(TO, OTHERS)


def test_blocks_are_written_behind_what_the_engine_has_submitted(
    worker: Worker,
) -> None:
    """Such as a forward that still reads them for the request that had them before."""
    layer = worker.layers[0]
    host = torch.empty(layer.shape, dtype=layer.dtype, pin_memory=True)
    host.copy_(layer, non_blocking=True)
    assert worker.submit("a").result(SOON_S) is True
    assert torch.equal(as_bytes(host), as_bytes(worker.before[0]))
    worker.assert_restored(TO)


@pytest.mark.parametrize("step", ["refused", "raises", "in time", "scatter", "garbled"])
def test_a_load_that_fails(
    step: str, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = worker.server.client
    if step == "scatter":
        monkeypatch.setattr(
            transfer_context,
            "scatter_cpu_to_paged_kv",
            lambda *_, **__: 1 / 0,
        )
    elif step == "in time":
        context: Any = worker.adapter.transfer_ctx
        context.engine_driven_context.mq_timeout = 0.01
        worker.server.answers = False
    else:
        answer: MessagingFuture[Any] = MessagingFuture()
        if step == "raises":
            answer.set_exception(ConnectionError("no server"))
        elif step == "refused":
            answer.set_result(PrepareRetrieveResponse(success=False))
        else:
            context = {"slots": [{}]}
            answer.set_result(PrepareRetrieveResponse(True, b"no pickle", context))
        client.prepare_retrieve.side_effect = lambda *_: answer
    assert worker.submit("a").result(SOON_S) is False
    # The chunks are not locked: the server is told in any case, and before vLLM.
    assert worker.server.calls[-1] == "commit_retrieve"
    assert worker.reports() == FAILED
    assert worker.reports() == NOTHING
    worker.assert_restored()


@pytest.mark.parametrize("chunks", [0, 1])
def test_an_answer_that_lacks_chunks_is_a_miss(chunks: int, small: Worker) -> None:
    del small.server.chunks[chunks:]
    assert small.submit("a").result(SOON_S) is False
    assert small.reports() == FAILED
    small.assert_restored()


def test_blocks_that_copies_may_still_write_are_not_given_away(
    small: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, committed = mock.MagicMock(), small.server.client.commit_retrieve
    monkeypatch.setattr(transfer_context.logger, "error", error)

    def fail(*_: Any, **__: Any) -> None:
        raise StillInFlightError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(transfer_context, "scatter_cpu_to_paged_kv", fail)
        load = small.submit("a")
        context: Any = small.adapter.transfer_ctx
        context._restore_executor.shutdown()
    committed.assert_called_once()
    assert not load.query()
    # Neither if the request is aborted, nor if the server is lost.
    small.adapter.report_as_loads_only({"a"})
    assert small.reports("a") == NOTHING
    small.adapter._health_event.clear()
    assert small.reports() == NOTHING
    said = [call for call in error.mock_calls if "keeps its blocks" in str(call)]
    assert len(said) == 1


def test_no_restore_draws_a_stream(
    small: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch-rbln has 32, and gives out again those that somebody uses."""
    assert small.submit("a").result(SOON_S) is True
    drawn = mock.MagicMock(wraps=torch.rbln.Stream)
    monkeypatch.setattr(torch.rbln, "Stream", drawn)
    with monkeypatch.context() as planted:
        for wait in ("wait", "synchronize"):
            planted.setattr(torch.rbln.Event, wait, lambda *_: 1 / 0)
        for name in ("b", "c"):
            assert small.submit(name).result(SOON_S) is False
    assert small.submit("d").result(SOON_S) is True
    drawn.assert_not_called()


@pytest.mark.parametrize("answer", [False, ConnectionError("no server")])
def test_chunks_that_the_server_does_not_take_back(answer: Any, small: Worker) -> None:
    """The bytes are in the blocks all the same."""
    small.server.client.commit_retrieve.side_effect = [answered(answer)]
    if isinstance(answer, Exception):
        small.server.client.commit_retrieve.side_effect = answer
    assert small.submit("a").result(SOON_S) is True
    assert small.reports() == LOADED
    small.assert_restored(TO)


def test_a_lost_server_is_not_waited_for(worker: Worker) -> None:
    """What it answers later is not written: the blocks are others' by then."""
    worker.server.answers = False
    loads = worker.submit("a")
    assert worker.server.asked.acquire(timeout=SOON_S)
    worker.adapter._health_event.clear()
    assert worker.reports() == FAILED
    worker.server.waiting[0].set_result(worker.server.response())
    worker.adapter.transfer_ctx.unregister()
    assert loads.result(SOON_S) is False
    assert "commit_retrieve" in worker.server.calls
    worker.adapter._health_event.set()
    assert worker.reports() == NOTHING
    worker.assert_restored()


def test_blocks_that_are_written_are_not_given_away(worker: Worker, gate: Gate) -> None:
    """Nor is what was written believed: the lost server may have reused the chunks."""
    loads = worker.submit("a")
    gate.await_writer()
    worker.adapter._health_event.clear()
    for _ in range(3):
        assert worker.reports() == NOTHING
    gate.open()
    assert loads.result(SOON_S) is False
    assert worker.reports() == FAILED
    assert worker.reports() == NOTHING


def test_what_a_new_server_answers_is_not_read_from_the_old_one_s_memory(
    worker: Worker,
) -> None:
    worker.server.answers = False
    loads = worker.submit("a")
    assert worker.server.asked.acquire(timeout=SOON_S)
    old = worker.adapter.transfer_ctx
    # As the heartbeats do when a server is back.
    assert worker.adapter._reregister_kv_caches_callback()
    assert loads.result(SOON_S) is False
    assert worker.reports() == FAILED
    worker.server.waiting[0].set_result(worker.server.response())
    old.close()
    worker.assert_restored()
    worker.server.answers = True
    assert worker.submit("b").result(SOON_S) is True
    assert worker.reports() == (set(), {"b"}, set())
    worker.assert_restored(TO)


@pytest.mark.parametrize("aborted", [False, True])
def test_a_request_that_ends_while_it_loads(
    aborted: bool, worker: Worker, gate: Gate
) -> None:
    """vLLM frees its blocks once: when its load is reported, and that has ended."""
    loads = worker.submit("a")
    gate.await_writer()
    if aborted:
        worker.adapter.report_as_loads_only({"a"})
    told = worker.reports("a")
    # Without the scheduler's word it would be reported right away.
    assert told == (NOTHING if aborted else ({"a"}, set(), set()))
    gate.open()
    loads.wait(SOON_S)
    assert worker.reports("a") == LOADED
    assert worker.reports("a") == NOTHING


@pytest.mark.parametrize("stop", ["unregister", "close"])
def test_stopping_with_loads_in_flight(stop: str, worker: Worker, gate: Gate) -> None:
    """One writes, and is waited for; others wait for the server, or for a thread."""
    writes = worker.submit("writes")
    gate.await_writer()
    worker.server.answers = False
    others = [
        worker.submit(f"waits {i}", OTHERS)
        for i in range(transfer_context.RESTORE_THREADS + 2)
    ]
    for _ in range(transfer_context.RESTORE_THREADS):
        assert worker.server.asked.acquire(timeout=SOON_S)
    context = worker.adapter.transfer_ctx
    stops = threading.Thread(target=getattr(context, stop))
    stops.start()
    assert [load.result(SOON_S) for load in others] == [False] * len(others)
    assert not writes.query() and stops.is_alive()
    gate.open()
    for waiting in worker.server.waiting:
        waiting.set_result(worker.server.response())
    stops.join(SOON_S)
    assert not stops.is_alive() and not threads()
    assert writes.result(SOON_S) is False
    # Every lock of a lookup is given back, and nothing comes behind the leave.
    restores = 1 + len(others)
    assert worker.server.calls.count("prepare_retrieve") == restores
    assert worker.server.calls.count("commit_retrieve") == restores
    if stop == "unregister":
        assert worker.server.calls[-1].startswith("unregister")
        assert worker.submit("late").result(SOON_S) is False
    worker.assert_restored(TO)


def test_a_load_without_an_event(small: Worker) -> None:
    """As where the server was not there when the event was asked for."""
    context = small.adapter.transfer_ctx
    layer = small.layers[0]
    host = torch.empty(layer.shape, dtype=layer.dtype, pin_memory=True)
    host.copy_(layer, non_blocking=True)
    loads = context.submit_retrieve(
        "a", object(), small.adapter.kv_caches, [TO], None, 2
    )
    assert loads.result(SOON_S) is True
    assert torch.equal(as_bytes(host), as_bytes(small.before[0]))
    small.assert_restored(TO)


def test_threads_are_named_and_bounded(small: Worker, gate: Gate) -> None:
    loads = [small.submit(str(i)) for i in range(transfer_context.RESTORE_THREADS + 3)]
    for _ in range(transfer_context.RESTORE_THREADS):
        gate.await_writer()
    assert len(threads()) == transfer_context.RESTORE_THREADS
    gate.open()
    assert all(load.result(SOON_S) for load in loads)


def test_two_workers_in_one_process(gate: Gate) -> None:
    workers = [Worker("blocks_first", shm) for shm in (True, False)]
    loads = [worker.submit("a") for worker in workers]
    gate.await_writer()
    gate.await_writer()
    # The end of one is not that of the other.
    ends = threading.Thread(target=workers[0].adapter.transfer_ctx.unregister)
    ends.start()
    gate.open()
    ends.join(SOON_S)
    assert loads[1].result(SOON_S) is True
    assert workers[1].reports() == LOADED
    for worker in workers:
        worker.assert_restored(TO)
        worker.close()


START = f"""
import os, sys
sys.path.append({str(SUPPORT)!r})
from restores import TO, Worker
import torch
worker = Worker("blocks_first", shm=False)
layer = worker.layers[0]
host = torch.empty(layer.shape, dtype=layer.dtype, pin_memory=True)
"""


@pytest.mark.sim
def test_stores_that_wait_do_not_hold_a_restore_up(rbln_sim_run: Any) -> None:
    """They wait for a forward that never ends, and are more than may stage at once."""
    code = """
    event = worker.adapter.create_recorded_event()
    host.copy_(layer, non_blocking=True)
    behind = worker.adapter.create_recorded_event()
    context = worker.adapter.transfer_ctx
    server = worker.server
    from restores import answered
    from types import SimpleNamespace
    from lmcache.v1.platform.devices.rbln import staging
    from lmcache.v1.multiprocess.transfer_context import async_engine_driven
    import threading
    arrived = threading.Semaphore(0)
    server.client.prepare_store.side_effect = lambda *_: answered(
        SimpleNamespace(context={})
    )
    class Event:
        def wait(self, stream=None):
            arrived.release()
            behind.wait(stream)
    stores = [
        context.submit_store(str(i), object(), worker.adapter.kv_caches, [[1, 2]],
                             Event(), 2)
        for i in range(4)
    ]
    for _ in range(4):
        assert arrived.acquire(timeout=120)
    loads = context.submit_retrieve("a", object(), worker.adapter.kv_caches, [TO],
                                    event, 2)
    assert loads.result(120) is True
    assert not any(store.query() for store in stores)
    print("restored", flush=True)
    os._exit(0)
    """
    done = rbln_sim_run(START + unindented(code), RBLN_SIM_FAULTS="hang:d2h:1")
    assert "restored" in done.stdout, done.stderr[-4000:]


@pytest.mark.sim
def test_a_failed_forward_fails_the_load_and_is_told_to_the_engine(
    rbln_sim_run: Any,
) -> None:
    code = """
    host.copy_(layer, non_blocking=True)
    assert worker.submit("a").result(120) is False
    assert worker.reports() == (set(), {"a"}, set(TO))
    try:
        torch.rbln.current_stream().synchronize()
    except RuntimeError:
        print("told", flush=True)
    # The stream is well again with the next that it has to do.
    host.copy_(layer, non_blocking=True)
    assert worker.submit("b").result(120) is True
    worker.assert_restored(TO)
    print("well again", flush=True)
    worker.close()
    """
    done = rbln_sim_run(START + unindented(code), RBLN_SIM_FAULTS="fail:d2h:1")
    assert "told" in done.stdout and "well again" in done.stdout, done.stderr[-4000:]


def unindented(code: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in code.splitlines())
