# SPDX-License-Identifier: Apache-2.0
"""Handovers between CPUs are measured where there are two, and told apart."""

# Standard
import math
import os

# Third Party
import pytest

# First Party
from benchmarks._handover import Handovers


def test_a_handover_takes_time_and_the_thread_may_run_anywhere_afterwards() -> None:
    allowed = os.sched_getaffinity(0)
    handovers = Handovers()
    seconds = [handovers.measure() for _ in range(20)]
    assert os.sched_getaffinity(0) == allowed
    if len(allowed) == 2:
        assert all(0 < value < 1 for value in seconds)
    else:
        assert set(seconds) == {0.0}
        assert handovers.limit() == math.inf


def test_without_two_cpus_nothing_is_measured_and_no_call_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    handovers = Handovers()
    assert {handovers.measure() for _ in range(3)} == {0.0}
    assert handovers.limit() == math.inf


def test_the_limit_is_a_multiple_of_the_quick_ones() -> None:
    handovers = Handovers()
    # However many are slow, as long as some are quick.
    handovers._measured = [10e-6] * 10 + [30e-6] * 90
    assert 20e-6 < handovers.limit() < 30e-6
    # None is known to be quick.
    handovers._measured = [30e-6] * 100
    assert handovers.limit() > 30e-6
    handovers._measured = [10e-6, 30e-6]
    assert 20e-6 < handovers.limit() < 30e-6
