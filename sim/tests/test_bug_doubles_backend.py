# SPDX-License-Identifier: Apache-2.0
"""The product's backend in the place of the test double raises no alarm."""

# Standard
from importlib.util import find_spec
from pathlib import Path

# Third Party
import pytest

# First Party
from sim.tests.doubles.runner import Run, assert_no_alarm, run_all

pytestmark = [
    pytest.mark.sim,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lmcache") is None, reason="needs the product"),
]

SEEDS = range(1, 61)


def test_the_backend_raises_no_alarm(tmp_path: Path) -> None:
    """In all layouts, stores of two threads and loads, each behind a forward."""
    schedules = [*["latest"] * 6, *["earliest"] * 6, *map(str, SEEDS)]
    runs = [Run("backend", schedule, seed) for seed, schedule in enumerate(schedules)]
    outcomes = run_all(runs, tmp_path, "sim.tests.doubles.backend")
    assert_no_alarm(runs, outcomes)
