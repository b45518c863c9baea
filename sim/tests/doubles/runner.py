# SPDX-License-Identifier: Apache-2.0
"""Starts the process that runs scenarios."""

# Standard
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
import json
import os
import subprocess
import sys

# First Party
from rbln_sim.pytest_plugin import machine_environment

REPO = Path(__file__).resolve().parents[3]
# RBLN_SIM_FAULTS of a scenario.
FAULTS = {"failing store": "fail:d2h:2"}


@dataclass(frozen=True)
class Run:
    """One scenario with one schedule.

    Attributes:
        scenario: Its name.
        deferred: The schedule, as for ``RBLN_SIM_DEFERRED``.
        seed: Of the values.
        bug: Name of the mistake that the test double makes; empty for none.
    """

    scenario: str
    deferred: str
    seed: int = 0
    bug: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        outcome: ``right``, ``differs``, ``refused``, ``crashed`` or ``broken``.
        log: What it wrote to stdout and stderr.
    """

    outcome: str
    log: str


def run_all(runs: Sequence[Run], folder: Path) -> list[Outcome]:
    """Run scenarios in deferred mode on two NPUs.

    Args:
        runs: What to run.
        folder: For logs, outcomes and the state of the simulated machines.

    Returns:
        The outcomes, in the order of the runs.

    Raises:
        RuntimeError: The process that runs them failed.
    """
    environment = machine_environment(folder, devices=2)
    runs_file, outcomes_file = folder / "runs.json", folder / "outcomes.json"
    requests = [asdict(run) | {"faults": FAULTS.get(run.scenario, "")} for run in runs]
    runs_file.write_text(json.dumps(requests))
    support = REPO / "tests" / "support"
    environment["PYTHONPATH"] += f"{os.pathsep}{support}"
    done = subprocess.run(
        [
            *(sys.executable, "-m", __package__),
            *(str(runs_file), str(outcomes_file), str(folder), str(os.cpu_count())),
        ],
        cwd=REPO,
        # A core for each child is more than there is.
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"the runs ended with status {done.returncode}: {done.stdout}"
        )
    return [Outcome(**outcome) for outcome in json.loads(outcomes_file.read_text())]


def assert_no_alarm(runs: Sequence[Run], outcomes: Sequence[Outcome]) -> None:
    """Fail if a run was not right, or wrote anything, and name the first such run.

    Where a scenario has faults, they are told of.
    """
    alarms = [
        f"{run}: {outcome.outcome}\n{outcome.log}"
        for run, outcome in zip(runs, outcomes, strict=True)
        if outcome.outcome != "right" or (outcome.log and run.scenario not in FAULTS)
    ]
    assert not alarms, f"{len(alarms)} alarms, the first: {alarms[0]}"
