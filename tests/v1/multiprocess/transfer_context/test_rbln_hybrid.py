# SPDX-License-Identifier: Apache-2.0
"""KV caches of several groups beside a real server: windows, null blocks, failures."""

# Standard
from collections.abc import Iterator
from typing import Any
import os
import threading

# Third Party
from hybrid import CHUNK, NULL, SOON_S, Group, HybridWorker, noted, runs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_reference import LAYOUTS, Case, Layout
import pytest

# First Party
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transfer_context import worker_transfer
from lmcache.v1.multiprocess.transfer_context.shm import ABORT_STORE
from lmcache.v1.platform.devices.rbln import transfer_context
from lmcache.v1.platform.devices.rbln.block_transfer import StillInFlightError
from lmcache.v1.platform.devices.rbln.lmcache_release import HAS_GROUPS
from rbln_sim.pytest_plugin import machine_environment
from tests.support.serving.servers import (
    CacheServer,
    CacheServerConfig,
    running,
)

pytestmark = [
    pytest.mark.sim,
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_GROUPS, reason="LMCache 0.5.6 moves one group"),
]

BLOCKS = 64


def a_group(layout: Layout = "blocks_first", window: int = -1, **sizes: int) -> Group:
    given_sizes = {"num_blocks": BLOCKS, "block_size": 16, "head_size": 4} | sizes
    return Group(Case(layout, **given_sizes), window)


#: A full group, one whose window is half a chunk, and one of two chunks and a bit less.
GROUPS = [a_group(), a_group(window=16, num_heads=1), a_group(window=50)]


@pytest.fixture(scope="module", params=["SHM", "pickle"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CacheServer]:
    folder = tmp_path_factory.mktemp("server")
    name = f"rbln_hybrid_{os.getpid()}" if request.param == "SHM" else ""
    made = CacheServer(
        CacheServerConfig(CHUNK, shm_name=name, l1_size_gb=0.1),
        {**machine_environment(folder / "machine"), "PYTHONHASHSEED": "0"},
        folder,
    )
    with running(made) as started:
        yield started


@pytest.fixture
def worker(server: CacheServer) -> Iterator[HybridWorker]:
    made = HybridWorker(server.port, GROUPS)
    yield made
    made.close()


def prefix_of(groups: list[Group], stored: list[set[int]], chunks: int) -> int:
    """The longest prefix of which every group has all that it needs, in chunks."""
    for end in range(chunks, 0, -1):
        needed = [range(end)[-(group.window_chunks or end) :] for group in groups]
        if all(set(want) <= has for want, has in zip(needed, stored, strict=True)):
            return end
    return 0


@st.composite
def group_lists(draw: st.DrawFn) -> list[Group]:
    layout = draw(st.sampled_from(LAYOUTS))
    groups = []
    for _ in range(draw(st.integers(2, 3))):
        block = draw(st.sampled_from([8, 16, 32]))
        # LMCache wants windows inside of a chunk in whole blocks.
        inside = st.sampled_from(range(block, CHUNK + 1, block))
        window = draw(st.just(-1) | inside | st.integers(CHUNK, 3 * CHUNK))
        sizes = {"num_heads": draw(st.integers(1, 3)), "block_size": block}
        layers = draw(st.integers(1, 2))
        groups.append(a_group(layout, window, num_layers=layers, **sizes))
    return groups


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(groups=group_lists(), data=st.data())
def test_every_element_is_where_plain_indexing_puts_it(
    server: CacheServer, groups: list[Group], data: st.DataObject
) -> None:
    draw = data.draw
    chunks, chance = draw(st.integers(1, 4)), draw(st.randoms(use_true_random=False))
    both = [
        chance.sample(range(1, BLOCKS), 2 * chunks * g.blocks_in_chunk) for g in groups
    ]
    held = [ids[: len(ids) // 2] for ids in both]
    into = [ids[len(ids) // 2 :] for ids in both]
    worker = HybridWorker(server.port, groups)
    try:
        # Two stores, of a request that has begun at a hit of vLLM's own each time.
        stored: list[set[int]] = [set() for _ in groups]
        cut = draw(st.integers(0, chunks))
        for name, (start, end) in {"a": (0, cut), "b": (cut, chunks)}.items():
            blocks = []
            for group, ids, has in zip(groups, held, stored, strict=True):
                per_chunk = group.blocks_in_chunk
                part = ids[start * per_chunk : end * per_chunk]
                nulls = draw(st.integers(0, len(part))) if group.window >= 0 else 0
                part[:nulls] = [NULL] * nulls
                blocks.append(part)
                has |= {
                    chunk
                    for chunk in range(start, end)
                    if NULL
                    not in [part[at - start * per_chunk] for at in group.held(chunk)]
                }
            if end > start:
                assert worker.store(name, blocks, start)
        worker.assert_restored()
        for looked_up in range(chunks, 0, -1):
            name = f"load {looked_up}"
            found = worker.found(name, looked_up)
            assert found == prefix_of(groups, stored, looked_up)
            if not found:
                continue
            blocks = []
            for group, ids in zip(groups, into, strict=True):
                nulls = group.passed(found * CHUNK)
                ids = ids[: found * group.blocks_in_chunk]
                blocks.append([NULL] * nulls + ids[nulls:])
            largest = max(group.case.block_size for group in groups)
            skip = largest * draw(st.integers(0, found * CHUNK // largest))
            assert worker.retrieve(name, blocks, skip)
            worker.assert_restored(held, blocks, skip)
            worker.reset()
    finally:
        worker.close()


def test_what_a_null_block_held_is_in_no_shorter_prefix(worker: HybridWorker) -> None:
    """Its chunk would be found by a prefix that ends with it, and needs that block."""
    blocks = runs(GROUPS, 4)
    assert worker.store("a", runs(GROUPS, 2))
    later = [ids[4:] for ids in blocks]
    later[2][0] = NULL
    assert worker.store("b", later, 2)
    # Chunk 2 lacks a block that the window of a prefix of three chunks has.
    assert worker.found("c", 3) == 2
    into = runs(GROUPS, 2, 30)
    assert worker.retrieve("c", into)
    worker.assert_restored(blocks, into)


def test_null_blocks_come_several_times_and_are_not_written(
    worker: HybridWorker,
) -> None:
    blocks, into = runs(GROUPS, 3), runs(GROUPS, 3, 30)
    assert worker.store("a", blocks)
    assert worker.found("b", 3) == 3
    into[1][:5], into[2][:4] = [NULL] * 5, [NULL] * 4
    # The window of 50 tokens wants chunks 1 and 2, and has block 2 of them no more.
    assert worker.retrieve("b", into)
    worker.assert_restored(blocks, into)


class FailsAt:
    """Copies that fail for one of the groups."""

    def __init__(self, copies: Any, group: int, error: Exception) -> None:
        self._copies, self._group, self._error = copies, group, error
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self._group + 1:
            raise self._error
        return self._copies(*args, **kwargs)


@pytest.mark.parametrize("group", range(3))
def test_a_restore_with_a_group_that_fails_is_a_miss(
    group: int, worker: HybridWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, into = runs(GROUPS, 3), runs(GROUPS, 3, 30)
    assert worker.store("a", blocks)
    assert worker.found("b", 3) == 3
    with monkeypatch.context() as planted:
        name = "scatter_cpu_to_paged_kv"
        fails = FailsAt(getattr(transfer_context, name), group, RuntimeError("planted"))
        planted.setattr(transfer_context, name, fails)
        assert not worker.retrieve("b", into)
    worker.reset()
    # Nothing of it is locked, and the next restore has it all.
    assert worker.found("c", 3) == 3
    assert worker.retrieve("c", into)
    worker.assert_restored(blocks, into)


def test_a_restore_whose_window_is_gone_is_a_miss(worker: HybridWorker) -> None:
    """Where a group's chunks are not those that its window wants."""
    blocks = runs(GROUPS, 3)
    assert worker.store("a", [*blocks[:2], [NULL] * 6])
    assert worker.found("b", 3) == 0
    assert not worker.retrieve("b", runs(GROUPS, 3, 30))
    worker.assert_restored()


def test_an_answer_that_lacks_a_group_s_chunk_is_a_miss(
    worker: HybridWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker.store("a", runs(GROUPS, 3))
    assert worker.found("b", 3) == 3
    transport = worker.context.engine_driven_context
    shm = not hasattr(transport, "prepare_retrieve_multigroup")
    name = "prepare_retrieve_grouped" if shm else "prepare_retrieve_multigroup"
    asks = getattr(transport, name)

    def lacks(*args: Any) -> Any:
        if shm:
            # Three lists, of slots in order of the groups.
            return tuple(part[:-1] for part in asks(*args))
        *groups, last = asks(*args)
        return [*groups, tuple(part[:-1] for part in last)]

    monkeypatch.setattr(transport, name, lacks)
    assert not worker.retrieve("b", runs(GROUPS, 3, 30))
    worker.assert_restored()


@pytest.mark.parametrize("group", range(3))
def test_a_store_with_a_group_that_fails_stores_nothing(
    group: int, worker: HybridWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, into = runs(GROUPS, 3), runs(GROUPS, 3, 30)
    with monkeypatch.context() as planted:
        name = "gather_paged_kv_to_cpu"
        fails = FailsAt(getattr(worker_transfer, name), group, RuntimeError("planted"))
        planted.setattr(worker_transfer, name, fails)
        assert not worker.store("a", blocks)
    assert worker.found("b", 3) == 0
    # Its slots are free again.
    assert worker.store("c", blocks)
    assert worker.found("d", 3) == 3
    assert worker.retrieve("d", into)
    worker.assert_restored(blocks, into)


def test_slots_that_copies_may_still_write_to_are_not_given_back(
    worker: HybridWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = noted(worker.client, "commit_store")
    name = "gather_paged_kv_to_cpu"
    fails = FailsAt(getattr(worker_transfer, name), 1, StillInFlightError("planted"))
    monkeypatch.setattr(worker_transfer, name, fails)
    assert not worker.store("a", runs(GROUPS, 2))
    assert commits == []


def test_blocks_that_a_window_has_passed_are_read_before_vllm_frees_them(
    worker: HybridWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It frees them at the next step, whether their store has ended or not."""
    waits, read = threading.Event(), threading.Event()
    gather, flush = (
        worker_transfer.gather_paged_kv_to_cpu,
        worker.context.flush_inflight_stores,
    )

    def gathers(*args: Any, **kwargs: Any) -> Any:
        assert waits.wait(SOON_S)
        chunks = gather(*args, **kwargs)
        read.set()
        return chunks

    def flushes() -> None:
        waits.set()
        flush()

    monkeypatch.setattr(worker_transfer, "gather_paged_kv_to_cpu", gathers)
    monkeypatch.setattr(worker.context, "flush_inflight_stores", flushes)
    store = worker.submit_store("a", runs(GROUPS, 2))
    was_read = read.is_set()
    waits.set()
    assert store.result(SOON_S)
    assert was_read


def test_stores_of_full_groups_are_not_waited_for(
    server: CacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = HybridWorker(server.port, [a_group(), a_group(num_heads=3)])
    flushed = []
    monkeypatch.setattr(
        worker.context, "flush_inflight_stores", lambda: flushed.append(1)
    )
    assert worker.store("a", runs(worker.groups, 2))
    assert not flushed
    worker.close()


class Held:
    """Copies of all groups but the first are held up."""

    def __init__(self, copies: Any) -> None:
        self._copies, self._calls = copies, 0
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        if self._calls > 1:
            self.reached.set()
            assert self.opened.wait(SOON_S)
        return self._copies(*args, **kwargs)


def test_a_restore_is_given_up_when_its_last_group_is_written(
    worker: HybridWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, into = runs(GROUPS, 3), runs(GROUPS, 3, 30)
    assert worker.store("a", blocks)
    assert worker.found("b", 3) == 3
    held = Held(transfer_context.scatter_cpu_to_paged_kv)
    monkeypatch.setattr(transfer_context, "scatter_cpu_to_paged_kv", held)
    load = worker.submit_retrieve("b", into)
    assert held.reached.wait(SOON_S)
    assert load.abandon() is False
    assert not load.query()
    held.opened.set()
    assert load.result(SOON_S) is False
    # Nothing is locked: the chunks can be restored again.
    assert worker.found("c", 3) == 3
    assert worker.retrieve("c", into)
    worker.assert_restored(blocks, into)


def test_a_restore_that_waits_for_its_server_is_given_up(worker: HybridWorker) -> None:
    blocks = runs(GROUPS, 3)
    assert worker.store("a", blocks)
    asked, client = threading.Event(), worker.client
    answers = client.prepare_retrieve

    def silent(*_: Any) -> Any:
        asked.set()
        return MessagingFuture()

    client.prepare_retrieve = silent
    load = worker.submit_retrieve("b", runs(GROUPS, 3, 30))
    assert asked.wait(SOON_S)
    client.prepare_retrieve = answers
    assert load.abandon() is True
    assert load.result(SOON_S) is False
    worker.context.give_up()
    worker.assert_restored()


def test_a_store_is_given_up_when_its_last_group_is_read(
    server: CacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = HybridWorker(server.port, [a_group(), a_group(num_heads=3)])
    commits = noted(worker.client, "commit_store")
    held = Held(worker_transfer.gather_paged_kv_to_cpu)
    monkeypatch.setattr(worker_transfer, "gather_paged_kv_to_cpu", held)
    blocks = runs(worker.groups, 2)
    store = worker.submit_store("a", blocks)
    assert held.reached.wait(SOON_S)
    assert store.abandon() is False
    assert not store.query()
    held.opened.set()
    assert store.result(SOON_S) is False
    worker.end_stores()
    # Nothing of either group is published, and slots are free again.
    assert commits == ([ABORT_STORE] if server.segment else [])
    assert worker.found("b", 2) == 0
    assert worker.store("c", blocks)
    assert worker.found("d", 2) == 2
    worker.close()
