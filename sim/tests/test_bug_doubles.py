# SPDX-License-Identifier: Apache-2.0
"""The simulator shows the mistakes of a backend, and raises no false alarm."""

# Standard
from collections import Counter
from pathlib import Path
import itertools

# Third Party
import pytest

# First Party
from sim.tests.doubles.bugs import Bug
from sim.tests.doubles.runner import Outcome, Run, assert_no_alarm, run_all

pytestmark = [pytest.mark.sim, pytest.mark.slow]

SEEDS = range(20)
RIGHT_RUNS = 1000
SCENARIOS = sorted({bug.mistake.scenario for bug in Bug})


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """What became of the runs of each bug, made together because they mostly sleep."""
    runs = [
        Run(bug.mistake.scenario, seed, bug.name)
        for bug, seed in itertools.product(Bug, SEEDS)
    ]
    done = run_all(runs, tmp_path_factory.mktemp("bugs"))
    found: dict[str, list[Outcome]] = {bug.name: [] for bug in Bug}
    for run, outcome in zip(runs, done, strict=True):
        found[run.bug].append(outcome)
    return found


@pytest.mark.parametrize("bug", Bug, ids=lambda bug: bug.name.lower())
def test_the_bug_is_seen_with_every_seed(
    bug: Bug, outcomes: dict[str, list[Outcome]]
) -> None:
    seen = outcomes[bug.name]
    assert len(seen) == len(SEEDS)
    for seed, outcome in zip(SEEDS, seen, strict=True):
        case = f"seed {seed}: {outcome.outcome}\n{outcome.log}"
        assert outcome.outcome == bug.mistake.seen_as, case
        assert bug.mistake.message in outcome.log, case


def test_the_right_double_raises_no_alarm(tmp_path: Path) -> None:
    scenarios = itertools.cycle(SCENARIOS)
    runs = [Run(next(scenarios), seed) for seed in range(RIGHT_RUNS)]
    done = run_all(runs, tmp_path)
    assert_no_alarm(runs, done)
    assert min(Counter(run.scenario for run in runs).values()) > 100
