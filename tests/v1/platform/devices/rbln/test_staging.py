# SPDX-License-Identifier: Apache-2.0
"""The staging pool: bounded, shared, and never handing out a lost buffer."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock
import gc
import os
import threading
import time

# Third Party
import pytest
import torch

# First Party
from lmcache.v1.platform.devices.rbln import staging
from lmcache.v1.platform.devices.rbln.staging import (
    BUFFER_BYTES,
    STAGING_ENV_VAR,
    StagingPool,
    staging_buffers_setting,
)


class Maker:
    """Counts the buffers that a pool makes."""

    def __init__(self) -> None:
        self.made = 0
        self._lock = threading.Lock()

    def __call__(self) -> torch.Tensor:
        with self._lock:
            self.made += 1
        return torch.zeros(16, dtype=torch.uint8)


def maker_of(*attempts: type[BaseException] | None) -> Callable[[], torch.Tensor]:
    """Return what makes a buffer, or raises, as it is told for each attempt."""
    left = iter(attempts)

    def make() -> torch.Tensor:
        error = next(left)
        if error is not None:
            raise error
        return torch.zeros(1)

    return make


def test_buffers_are_made_on_demand_and_reused() -> None:
    maker = Maker()
    pool = StagingPool(4, maker)
    assert maker.made == 0
    for _ in range(3):
        with pool.borrow(2) as loan:
            assert len(loan.buffers) == 2
    assert maker.made == 2


def test_a_second_ring_takes_what_is_left() -> None:
    pool = StagingPool(3, Maker())
    with pool.borrow(2) as first, pool.borrow(6) as second:
        assert (len(first.buffers), len(second.buffers)) == (2, 1)
        addresses = {buffer.data_ptr() for buffer in first.buffers + second.buffers}
        assert len(addresses) == 3


def test_threads_never_share_a_buffer_and_the_pool_never_grows() -> None:
    maker = Maker()
    pool = StagingPool(3, maker)

    def work(mark: int) -> None:
        for _ in range(200):
            with pool.borrow(2) as loan:
                for buffer in loan.buffers:
                    buffer.fill_(mark)
                for buffer in loan.buffers:
                    assert bool((buffer == mark).all())

    with ThreadPoolExecutor(8) as executor:
        for result in [executor.submit(work, i + 1) for i in range(8)]:
            result.result()
    assert maker.made == 3


def test_a_waiting_thread_gets_the_buffer_that_is_returned() -> None:
    pool = StagingPool(1, Maker())
    got = threading.Event()

    def wait() -> None:
        with pool.borrow(1):
            got.set()

    with ThreadPoolExecutor(1) as executor:
        with pool.borrow(1):
            result = executor.submit(wait)
            assert not got.wait(0.05)
        result.result(timeout=60)
    assert got.is_set()


def test_those_who_wait_are_served_in_order() -> None:
    pool = StagingPool(1, Maker())
    served: list[int] = []

    def wait(number: int) -> None:
        with pool.borrow(1):
            served.append(number)

    with ThreadPoolExecutor(12) as executor:
        with pool.borrow(1):
            results = []
            for number in range(12):
                results.append(executor.submit(wait, number))
                while len(pool._line) <= number:
                    time.sleep(0.001)
        for result in results:
            result.result(timeout=60)
    assert served == list(range(12))


@pytest.mark.parametrize(("max_loans", "threads"), [(1, 3), (2, 5), (None, 12)])
def test_no_thread_starves(max_loans: int | None, threads: int) -> None:
    """Also beside others that borrow again at once."""
    pool = StagingPool(8, Maker(), max_loans)
    start = threading.Barrier(threads)
    counts = [0] * threads
    most = 0
    until = threading.Event()

    def work(thread: int) -> None:
        nonlocal most
        start.wait()
        while not until.is_set():
            with pool.borrow(1):
                most = max(most, pool.lent())
                time.sleep(0.0005)
            counts[thread] += 1
            if sum(counts) > 60 * threads:
                until.set()

    with ThreadPoolExecutor(threads) as executor:
        for result in [executor.submit(work, i) for i in range(threads)]:
            result.result(timeout=60)
    assert most <= (max_loans or 8)
    assert min(counts) > 20


@pytest.mark.parametrize("cpus", [1, 2, 64])
def test_as_many_transfers_stage_at_a_time_as_there_are_cpus(
    monkeypatch: pytest.MonkeyPatch, cpus: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    assert staging.max_transfers() == cpus


def test_a_buffer_that_comes_back_while_another_is_not_made_is_used() -> None:
    holds: list[staging.Loan] = []

    def make() -> torch.Tensor:
        if not holds:
            return torch.zeros(1)
        # The only one that memory allows is given back before this one fails.
        holds.pop().__exit__()
        raise MemoryError

    pool = StagingPool(2, make)
    holds.append(pool.borrow(1))
    with pool.borrow(1) as loan:
        assert len(loan.buffers) == 1


def test_a_loan_that_is_dropped_comes_back_at_once_after_a_failure() -> None:
    pool = StagingPool(2, maker_of(None, MemoryError))
    gc.disable()
    try:
        loan = pool.borrow(2)
        assert (len(loan.buffers), pool.lent()) == (1, 1)
        del loan
        assert pool.lent() == 0
    finally:
        gc.enable()


def test_an_interrupt_that_somebody_keeps_holds_no_place() -> None:
    pool = StagingPool(2, maker_of(KeyboardInterrupt, None, None), max_loans=1)
    with pytest.raises(KeyboardInterrupt) as kept:
        pool.borrow(2)
    assert (pool.lent(), pool.loans) == (0, 0)
    with pool.borrow(2) as loan:
        assert len(loan.buffers) == 2
    assert kept.value.__traceback__ is not None


def test_only_loans_that_were_made_are_counted() -> None:
    pool = StagingPool(2, Maker(), max_loans=1)
    with ThreadPoolExecutor(1) as executor:
        with pool.borrow(1):
            result = executor.submit(pool.borrow, 1)
            while not pool._line:
                time.sleep(0.001)
            assert (pool.loans, pool.lent()) == (1, 1)
        result.result(timeout=60).__exit__()
    assert (pool.loans, pool.lent()) == (2, 0)


def test_a_buffer_given_back_early_serves_another_ring() -> None:
    pool = StagingPool(2, Maker())
    with pool.borrow(2) as first:
        first.keep(1)
        with pool.borrow(2) as second:
            assert (len(first.buffers), len(second.buffers)) == (1, 1)
            assert first.buffers[0].data_ptr() != second.buffers[0].data_ptr()
    with pool.borrow(3) as loan:
        assert len({buffer.data_ptr() for buffer in loan.buffers}) == 2


def test_buffers_come_back_after_an_exception() -> None:
    pool = StagingPool(1, Maker())
    for _ in range(3):
        with pytest.raises(KeyError), pool.borrow(1):
            raise KeyError


def test_a_failed_allocation_loses_no_capacity() -> None:
    pool = StagingPool(2, maker_of(MemoryError, None, None))
    with pytest.raises(MemoryError), pool.borrow(2):
        pass
    with pool.borrow(2) as loan:
        assert len(loan.buffers) == 2


def test_a_buffer_with_copies_in_flight_is_never_handed_out_again() -> None:
    pool = StagingPool(2, Maker())
    with pool.borrow(1) as loan:
        lost = loan.buffers[0]
        loan.begin_copies()
    assert (pool.lent(), pool.lost()) == (0, 1)
    with pool.borrow(2) as loan:
        (other,) = loan.buffers
        assert other.data_ptr() != lost.data_ptr()
        loan.begin_copies()
        loan.end_copies()
    with pool.borrow(2) as loan:
        loan.begin_copies()
    assert pool.lost() == 2
    with pytest.raises(RuntimeError, match="restart the process"):
        pool.borrow(1)


def test_a_waiting_thread_learns_that_all_buffers_are_lost() -> None:
    pool = StagingPool(1, Maker())
    with ThreadPoolExecutor(1) as executor:
        with pool.borrow(1) as loan:
            result = executor.submit(pool.borrow, 1)
            loan.begin_copies()
        with pytest.raises(RuntimeError, match="restart the process"):
            result.result(timeout=60)


def test_a_loan_that_is_dropped_comes_back() -> None:
    """As after an interrupt between the call and the ``with`` block."""
    pool = StagingPool(2, Maker())
    pool.borrow(1)
    assert pool.lent() == 0
    with pool.borrow(2) as loan:
        assert len(loan.buffers) == 2
    dropped = pool.borrow(1)
    dropped.begin_copies()
    del dropped
    assert (pool.lent(), pool.lost()) == (0, 1)


def test_a_waiting_thread_finds_a_buffer_that_nobody_announced() -> None:
    pool = StagingPool(1, Maker())
    held = [pool.borrow(1)]
    with ThreadPoolExecutor(1) as executor:
        result = executor.submit(pool.borrow, 1)
        assert not result.done()
        held.clear()
        assert len(result.result(timeout=60).buffers) == 1


def failing_maker(good: int) -> Callable[[], torch.Tensor]:
    """Return a maker that has memory for ``good`` buffers."""
    made: list[int] = []

    def make() -> torch.Tensor:
        if len(made) == good:
            raise RuntimeError("out of pinned memory")
        made.append(1)
        return torch.zeros(16)

    return make


def test_a_transfer_goes_on_with_the_buffers_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warning = MagicMock()
    monkeypatch.setattr(staging.logger, "warning", warning)
    pool = StagingPool(4, failing_maker(1))
    for _ in range(3):
        with pool.borrow(2) as loan:
            assert len(loan.buffers) == 1
    warning.assert_called_once()
    assert "out of pinned memory" in str(warning.call_args)


def test_a_transfer_without_memory_waits_for_another_s_buffer() -> None:
    pool = StagingPool(4, failing_maker(1))
    with ThreadPoolExecutor(2) as executor:
        with pool.borrow(2) as loan:
            waiting = [executor.submit(work_once, pool) for _ in range(2)]
            assert not any(result.done() for result in waiting)
            address = loan.buffers[0].data_ptr()
        assert [result.result(timeout=60) for result in waiting] == [[address]] * 2


def work_once(pool: StagingPool) -> list[int]:
    with pool.borrow(2) as loan:
        return [buffer.data_ptr() for buffer in loan.buffers]


def test_without_any_buffer_the_reason_is_raised() -> None:
    pool = StagingPool(4, failing_maker(0))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of pinned memory"):
            pool.borrow(2)
    assert pool.lent() == 0


def test_closing_frees_idle_buffers() -> None:
    maker = Maker()
    pool = StagingPool(2, maker)
    with pool.borrow(2):
        pass
    pool.close()
    with pool.borrow(2):
        pass
    assert maker.made == 4


@pytest.mark.parametrize(("raw", "mib"), [("64", 64), (" 8 ", 8), ("23", 23)])
def test_the_setting_is_in_mib(
    monkeypatch: pytest.MonkeyPatch, raw: str, mib: int
) -> None:
    monkeypatch.setenv(STAGING_ENV_VAR, raw)
    assert staging_buffers_setting() == (mib << 20) // BUFFER_BYTES


def test_the_default_is_64_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    assert STAGING_ENV_VAR == "LMCACHE_RBLN_STAGING_MIB"
    for unset in (lambda: monkeypatch.setenv(STAGING_ENV_VAR, " "),
                  lambda: monkeypatch.delenv(STAGING_ENV_VAR)):  # fmt: skip
        unset()
        assert staging_buffers_setting() * BUFFER_BYTES == 64 << 20


@pytest.mark.parametrize("raw", ["7", "0", "-4", "64M", "1.5", "²"])
def test_a_setting_that_is_no_size_is_refused(
    monkeypatch: pytest.MonkeyPatch, raw: str
) -> None:
    monkeypatch.setenv(STAGING_ENV_VAR, raw)
    with pytest.raises(ValueError, match=STAGING_ENV_VAR):
        staging_buffers_setting()
