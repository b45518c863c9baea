# SPDX-License-Identifier: Apache-2.0
"""The simulator shows the mistakes of a backend, and raises no false alarm."""

# Standard
from pathlib import Path
import itertools

# Third Party
import pytest

# First Party
from sim.tests.doubles.bugs import Bug
from sim.tests.doubles.runner import DIFFERS, Outcome, Run
from sim.tests.doubles.runner import assert_no_alarm, run_all

pytestmark = [pytest.mark.sim, pytest.mark.slow]

SCENARIOS = sorted({bug.mistake.scenario for bug in Bug})
SEEDS = range(1, 21)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """What became of one run of each bug; torch is imported once for all of them."""
    runs = [Run(bug.mistake.scenario, "latest", bug=bug.name) for bug in Bug]
    done = run_all(runs, tmp_path_factory.mktemp("bugs"))
    return {run.bug: outcome for run, outcome in zip(runs, done, strict=True)}


@pytest.mark.parametrize("bug", Bug, ids=lambda bug: bug.name.lower())
def test_the_bug_is_seen(bug: Bug, outcomes: dict[str, Outcome]) -> None:
    seen = outcomes[bug.name]
    assert seen.outcome == DIFFERS, seen.log


def test_the_right_double_raises_no_alarm(tmp_path: Path) -> None:
    schedules = ["latest", "earliest", *map(str, SEEDS)]
    runs = [
        Run(scenario, schedule, seed)
        for (seed, schedule), scenario in itertools.product(
            enumerate(schedules), SCENARIOS
        )
    ]
    assert_no_alarm(runs, run_all(runs, tmp_path))
