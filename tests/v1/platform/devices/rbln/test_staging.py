# SPDX-License-Identifier: Apache-2.0
"""The staging pool: bounded, shared, and never handing out a lost buffer."""

# Future
from __future__ import annotations

# Standard
from concurrent.futures import ThreadPoolExecutor
import threading

# Third Party
import pytest
import torch

# First Party
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


def test_buffers_are_made_on_demand_and_reused() -> None:
    maker = Maker()
    pool = StagingPool(4, maker)
    assert maker.made == 0
    for _ in range(3):
        with pool.ring(2) as buffers:
            assert len(buffers) == 2
    assert maker.made == 2


def test_a_second_ring_takes_what_is_left() -> None:
    pool = StagingPool(3, Maker())
    with pool.ring(2) as first, pool.ring(6) as second:
        assert (len(first), len(second)) == (2, 1)
        addresses = {buffer.data_ptr() for buffer in first + second}
        assert len(addresses) == 3


def test_threads_never_share_a_buffer_and_the_pool_never_grows() -> None:
    maker = Maker()
    pool = StagingPool(3, maker)

    def work(mark: int) -> None:
        for _ in range(200):
            with pool.ring(2) as buffers:
                for buffer in buffers:
                    buffer.fill_(mark)
                for buffer in buffers:
                    assert bool((buffer == mark).all())

    with ThreadPoolExecutor(8) as executor:
        for result in [executor.submit(work, i + 1) for i in range(8)]:
            result.result()
    assert maker.made == 3


def test_a_waiting_thread_gets_the_buffer_that_is_returned() -> None:
    pool = StagingPool(1, Maker())
    got = threading.Event()

    def wait() -> None:
        with pool.ring(1):
            got.set()

    with ThreadPoolExecutor(1) as executor:
        with pool.ring(1):
            result = executor.submit(wait)
            assert not got.wait(0.05)
        result.result(timeout=10)
    assert got.is_set()


def test_a_buffer_given_back_early_serves_another_ring() -> None:
    pool = StagingPool(2, Maker())
    with pool.ring(2) as first:
        pool.give_back([first.pop()])
        with pool.ring(2) as second:
            assert (len(first), len(second)) == (1, 1)
            assert first[0].data_ptr() != second[0].data_ptr()
    with pool.ring(3) as buffers:
        assert len({buffer.data_ptr() for buffer in buffers}) == 2


def test_buffers_come_back_after_an_exception() -> None:
    pool = StagingPool(1, Maker())
    for _ in range(3):
        with pytest.raises(KeyError), pool.ring(1):
            raise KeyError


def test_a_failed_allocation_loses_no_capacity() -> None:
    attempts = iter([MemoryError, None, None])

    def make() -> torch.Tensor:
        error = next(attempts)
        if error is not None:
            raise error
        return torch.zeros(1)

    pool = StagingPool(2, make)
    with pytest.raises(MemoryError), pool.ring(2):
        pass
    with pool.ring(2) as buffers:
        assert len(buffers) == 2


def test_a_quarantined_buffer_is_never_handed_out_again() -> None:
    pool = StagingPool(2, Maker())
    with pool.ring(2) as buffers:
        lost = buffers.pop()
        pool.quarantine([lost])
    with pool.ring(2) as buffers:
        assert [buffer.data_ptr() for buffer in buffers] != [lost.data_ptr()]
        assert len(buffers) == 1
        pool.quarantine(list(buffers))
        buffers.clear()
    with pytest.raises(RuntimeError, match="restart the process"), pool.ring(1):
        pass


def test_a_waiting_thread_learns_that_all_buffers_are_lost() -> None:
    pool = StagingPool(1, Maker())

    def wait() -> None:
        with pool.ring(1):
            pass

    with ThreadPoolExecutor(1) as executor, pool.ring(1) as buffers:
        result = executor.submit(wait)
        pool.quarantine([buffers.pop()])
        with pytest.raises(RuntimeError, match="restart the process"):
            result.result(timeout=30)


def test_closing_frees_idle_buffers() -> None:
    maker = Maker()
    pool = StagingPool(2, maker)
    with pool.ring(2):
        pass
    pool.close()
    with pool.ring(2):
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
