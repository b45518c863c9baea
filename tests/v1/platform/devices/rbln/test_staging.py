# SPDX-License-Identifier: Apache-2.0
"""The staging arena: bounded, fair, and nothing of it is lost for good."""

# Standard
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock
import itertools
import os
import threading
import time

# Third Party
from interrupts import InterruptAt
import pytest
import torch

# First Party
from lmcache.v1.platform.devices.rbln import lanes, staging
from lmcache.v1.platform.devices.rbln.lanes import Lane
from lmcache.v1.platform.devices.rbln.staging import Lease, StagingArena

DEVICE = torch.device("rbln:0")
#: Longer than any of these waits may take.
LIMIT_S = 60


class Maker:
    """Makes small buffers, and counts them; fails where it is told to."""

    def __init__(self, *failures: type[BaseException] | None) -> None:
        self.made = 0
        self._failures = iter(failures)
        self._lock = threading.Lock()

    def __call__(self) -> torch.Tensor:
        with self._lock:
            failure = next(self._failures, None)
            if failure is not None:
                raise failure("out of pinned memory")
            self.made += 1
        return torch.zeros(16, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def maker(monkeypatch: pytest.MonkeyPatch) -> Maker:
    """No device is needed: without streams a lease is memory alone."""
    maker = Maker()
    monkeypatch.setattr(staging, "make_buffer", maker)
    monkeypatch.setattr(lanes, "supports_async_copies", lambda: False)
    monkeypatch.setattr(staging, "_warned", set())
    return maker


@contextmanager
def leased(arena: StagingArena, want: int = 1) -> Iterator[Lease]:
    lease = Lease(DEVICE, want)
    try:
        arena.acquire(lease)
        yield lease
    finally:
        arena.release(lease)


def waiting(arena: StagingArena) -> int:
    return sum(lease.lane is None and not lease.ended for lease in arena._leases)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_buffers_are_made_on_demand_and_reused(maker: Maker) -> None:
    arena = StagingArena(4, 4)
    assert maker.made == 0
    for _ in range(3):
        with leased(arena, 2) as lease:
            assert len(lease.buffers) == 2
    assert maker.made == 2
    with leased(arena, 0) as lease:
        assert lease.buffers == []


def test_a_second_lease_takes_what_is_left() -> None:
    arena = StagingArena(3, 3)
    with leased(arena, 2) as first, leased(arena, 2) as second:
        assert (len(first.buffers), len(second.buffers)) == (2, 1)
        assert first.lane is not second.lane
        addresses = {buffer.data_ptr() for buffer in first.buffers + second.buffers}
        assert len(addresses) == 3


def test_threads_never_share_a_buffer_or_a_lane(maker: Maker) -> None:
    arena = StagingArena(3, 2)
    users: set[int] = set()

    def work(mark: int) -> None:
        for _ in range(200):
            with leased(arena, 2) as lease:
                assert id(lease.lane) not in users
                users.add(id(lease.lane))
                for buffer in lease.buffers:
                    buffer.fill_(mark)
                for buffer in lease.buffers:
                    assert bool((buffer == mark).all())
                users.remove(id(lease.lane))

    with ThreadPoolExecutor(8) as executor:
        for result in [executor.submit(work, i + 1) for i in range(8)]:
            result.result()
    assert maker.made == 3
    assert arena.in_use() == (0, 0)


def test_those_who_wait_are_served_in_order() -> None:
    arena = StagingArena(1, 1)
    served: list[int] = []

    def wait(number: int) -> None:
        with leased(arena):
            served.append(number)

    with ThreadPoolExecutor(12) as executor:
        with leased(arena):
            results = []
            for number in range(12):
                results.append(executor.submit(wait, number))
                until(lambda: waiting(arena) > number)  # noqa: B023
        for result in results:
            result.result(timeout=LIMIT_S)
    assert served == list(range(12))


def test_no_more_leases_at_a_time_than_allowed() -> None:
    arena = StagingArena(8, 2)
    with ThreadPoolExecutor(1) as executor:
        with leased(arena), leased(arena):
            result = executor.submit(lambda: leased(arena).__enter__().buffers)
            until(lambda: waiting(arena) == 1)
            assert arena.in_use() == (3, 0)
            assert not result.done()
        result.result(timeout=LIMIT_S)


@pytest.mark.parametrize(("cpus", "transfers"), [(1, 1), (2, 2), (64, 8)])
def test_as_many_transfers_stage_at_a_time_as_there_are_cpus(
    monkeypatch: pytest.MonkeyPatch, cpus: int, transfers: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    assert staging.max_transfers() == transfers


def test_who_gives_up_waiting_holds_no_place() -> None:
    arena = StagingArena(1, 1)
    interrupted = Lease(DEVICE, 1)
    with leased(arena):
        arena._leases.append(interrupted)
        arena.release(interrupted)
    with leased(arena) as lease:
        assert len(lease.buffers) == 1


def test_what_comes_back_after_an_exception() -> None:
    arena = StagingArena(1, 1)
    for _ in range(3):
        with pytest.raises(KeyError), leased(arena):
            raise KeyError
    assert arena.in_use() == (0, 0)


def test_a_failed_allocation_is_named_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "make_buffer", Maker(MemoryError, RuntimeError))
    arena = StagingArena(2, 2)
    for _ in range(2):
        lease = Lease(DEVICE, 2)
        with pytest.raises(RuntimeError, match="LMCACHE_RBLN_STAGING_MIB"):
            arena.acquire(lease)
        arena.release(lease)
    with leased(arena, 2) as lease:
        assert len(lease.buffers) == 2


def test_a_transfer_goes_on_with_the_buffers_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warning = MagicMock()
    monkeypatch.setattr(staging.logger, "warning", warning)
    failures = [None, *[RuntimeError] * 3]
    monkeypatch.setattr(staging, "make_buffer", Maker(*failures))
    arena = StagingArena(4, 4)
    for _ in range(3):
        with leased(arena, 2) as lease:
            assert len(lease.buffers) == 1
    warning.assert_called_once()
    assert "out of pinned memory" in str(warning.call_args)


def test_closing_frees_idle_buffers(maker: Maker) -> None:
    arena = StagingArena(2, 2)
    for made in (2, 4):
        with leased(arena, 2):
            pass
        arena.close()
        assert maker.made == made


class Device:
    """Stands in for a device whose streams do what a test says."""

    def __init__(self) -> None:
        #: What the next questions are answered with; then: whether it is idle.
        self.answers: list[bool | Exception] = []
        self.idle = True
        #: What waits for its end tell.
        self.drained = False
        #: Holds up who asks.
        self.asked = threading.Event()
        self.answering = threading.Event()
        self.answering.set()
        self.given = itertools.cycle(range(1, lanes.STREAM_POOL + 1))
        self.current = 0

    def Stream(self, device: torch.device) -> Any:  # noqa: N802
        return MagicMock(stream_id=next(self.given), query=self.query)

    def current_stream(self, device: torch.device) -> Any:
        return MagicMock(stream_id=self.current)

    def stream(self, _: Any) -> Any:
        return MagicMock()

    def query(self) -> bool:
        self.asked.set()
        assert self.answering.wait(LIMIT_S)
        answer = self.answers.pop(0) if self.answers else self.idle
        if isinstance(answer, Exception):
            raise answer
        return answer

    def drain(self, *_: object) -> bool:
        return self.drained


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Give the arena streams, of a device that a test controls."""
    npu = Device()
    monkeypatch.setattr(lanes, "torch_rbln", lambda: npu)
    monkeypatch.setattr(lanes, "supports_async_copies", lambda: True)
    monkeypatch.setattr(lanes, "kv_transpose", lambda: npu)
    probe = torch.zeros(8, dtype=torch.uint8)
    monkeypatch.setattr(lanes, "make_probe", lambda _: (probe, probe.clone()))
    return npu


def test_what_is_not_drained_comes_back_when_its_stream_is_idle(npu: Device) -> None:
    arena = StagingArena(2, 2)
    with leased(arena) as lease:
        lease.busy = True
        lost = lease.buffers[0].data_ptr()
        # Busy, then the old failure, and busy again.
        npu.answers = [False, False, RuntimeError("an old failure"), False]
    assert arena.in_use() == (0, 1)
    with leased(arena, 2) as lease:
        (other,) = lease.buffers
        assert other.data_ptr() != lost
    assert arena.in_use() == (0, 0)
    with leased(arena, 2) as lease:
        assert len(lease.buffers) == 2


def test_where_all_is_held_by_failed_copies_it_is_said(npu: Device) -> None:
    # Who asks is not one of those that hold it.
    said = "held by 1 that failed.*comes back when the device is idle"
    arena = StagingArena(1, 1)
    with ThreadPoolExecutor(1) as executor:
        with leased(arena) as lease:
            lease.busy = True
            npu.idle = False
            waits = executor.submit(leased(arena).__enter__)
            until(lambda: waiting(arena) == 1)
        # Also to who waits already.
        with pytest.raises(RuntimeError, match=said):
            waits.result(timeout=LIMIT_S)
    with pytest.raises(RuntimeError, match=said), leased(arena):
        pass
    npu.idle = True
    with leased(arena) as lease:
        assert len(lease.buffers) == 1


def test_who_finds_all_held_by_failed_copies_waits_for_the_device(
    npu: Device,
) -> None:
    arena = StagingArena(1, 1)
    with leased(arena) as lease:
        lease.busy = True
        npu.idle, npu.drained = False, True
    with leased(arena) as lease:
        assert len(lease.buffers) == 1


def test_a_driver_that_holds_up_who_asks_holds_up_nobody_else(npu: Device) -> None:
    arena = StagingArena(2, 2)
    failed = Lease(DEVICE, 1)
    arena.acquire(failed)
    with ThreadPoolExecutor(2) as executor:
        try:
            failed.busy = True
            npu.answering.clear()
            releases = executor.submit(arena.release, failed)
            assert npu.asked.wait(LIMIT_S)

            def transfer() -> None:
                with leased(arena) as lease:
                    assert len(lease.buffers) == 1

            executor.submit(transfer).result(timeout=LIMIT_S)
            assert not releases.done()
        finally:
            npu.answering.set()
        releases.result(timeout=LIMIT_S)
    assert arena.in_use() == (0, 0)


def test_who_waits_goes_on_while_the_driver_holds_up_who_asks(npu: Device) -> None:
    arena = StagingArena(2, 2)
    failed, over = Lease(DEVICE, 1), Lease(DEVICE, 1)
    arena.acquire(failed)
    arena.acquire(over)
    with ThreadPoolExecutor(2) as executor:
        waits = executor.submit(leased(arena).__enter__)
        try:
            until(lambda: waiting(arena) == 1)
            failed.busy = failed.ended = True
            npu.answering.clear()
            releases = executor.submit(arena.release, over)
            assert len(waits.result(timeout=LIMIT_S).buffers) == 1
            assert not releases.done()
        finally:
            npu.answering.set()
        releases.result(timeout=LIMIT_S)


def test_a_lane_that_somebody_asks_goes_to_nobody_else(
    npu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = StagingArena(2, 2)
    failed = Lease(DEVICE, 1)
    arena.acquire(failed)
    failed.busy = failed.ended = True
    preempted, goes_on = threading.Event(), threading.Event()
    is_idle = Lane.is_idle

    def late(lane: Lane) -> bool:
        if threading.current_thread() is not threading.main_thread():
            preempted.set()
            assert goes_on.wait(LIMIT_S)
        return is_idle(lane)

    monkeypatch.setattr(Lane, "is_idle", late)
    with ThreadPoolExecutor(1) as executor:
        try:
            asks = executor.submit(arena.take_back)
            assert preempted.wait(LIMIT_S)
            with leased(arena) as other:
                assert other.lane is not failed.lane
        finally:
            goes_on.set()
        asks.result(timeout=LIMIT_S)
    with leased(arena) as other:
        assert other.lane is failed.lane


def test_streams_are_apart_from_one_another_and_from_callers(npu: Device) -> None:
    arena = StagingArena(8, 8)
    npu.current = 3

    def streams() -> list[int]:
        leases = [Lease(DEVICE, 1) for _ in range(8)]
        try:
            for lease in leases:
                arena.acquire(lease)
            return [lease.lane.stream.stream_id for lease in leases if lease.lane]
        finally:
            for lease in leases:
                arena.release(lease)

    first = streams()
    assert len({*first, 3}) == 9
    # They are kept: the pool of streams is small, and others draw from it.
    assert streams() == first
    # A caller comes with a stream that is one of ours.
    npu.current = first[4]
    second = streams()
    assert len({*second, 3, first[4]}) == 10
    assert [a for a, b in zip(first, second, strict=True) if a != b] == [first[4]]


def test_where_callers_have_every_stream_only_their_current_one_is_avoided(
    npu: Device,
) -> None:
    arena = StagingArena(1, 1)
    for npu.current in range(1, lanes.STREAM_POOL + 1):
        with leased(arena) as lease:
            assert lease.lane is not None
            assert lease.lane.stream.stream_id != npu.current
            kept = lease.lane.stream
    # What a lane has is not drawn again for what is not current.
    for npu.current in {*range(1, lanes.STREAM_POOL + 1)} - {kept.stream_id}:
        with leased(arena) as lease:
            assert lease.lane is not None
            assert lease.lane.stream is kept


FILES = ("rbln/staging.py", "rbln/lanes.py")
#: How the "finally" begins that ends a question.
QUIET = ("if mine:", "lease.asked = False")


@pytest.mark.parametrize("fails", [False, True])
def test_capacity_comes_back_after_an_interrupt_anywhere(
    npu: Device, fails: bool
) -> None:
    arena = StagingArena(2, 2)

    def work() -> None:
        lease = Lease(DEVICE, 2)
        try:
            arena.acquire(lease)
            lease.busy = True
            lease.busy = fails
        finally:
            lease.ended = True
            arena.release(lease)

    def look() -> None:
        assert arena.in_use() == (0, 0)
        with leased(arena, 2) as lease:
            assert len(lease.buffers) == 2

    struck = 0
    # In another thread: the one that was interrupted might have the lock still.
    with ThreadPoolExecutor(1) as executor:
        for line in itertools.count(1):
            if not InterruptAt(line, *FILES, quiet=QUIET).strikes(work):
                break
            struck += 1
            executor.submit(look).result(timeout=LIMIT_S)
    assert struck > 50
