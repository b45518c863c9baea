# SPDX-License-Identifier: Apache-2.0
"""Runs scenarios, each in a process of its own with a simulated machine of its own.

A schedule counts from a process's first use of an NPU on.
"""

# Standard
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
import os
import queue

# First Party
from rbln_sim.pytest_plugin import machine_environment
from sim.tests.zygote import REPO, zygote

# RBLN_SIM_FAULTS of a scenario.
FAULTS = {"failing_store": "fail:d2h:2"}
RIGHT, DIFFERS, BROKEN = "right", "differs", "broken"


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
        outcome: ``right``, ``differs``, or ``broken`` for every other error.
        log: What it wrote to stdout and stderr.
    """

    outcome: str
    log: str


def run_all(
    runs: Sequence[Run], folder: Path, module: str = "sim.tests.doubles.scenarios"
) -> list[Outcome]:
    """Run scenarios in deferred mode on two NPUs.

    Args:
        runs: What to run.
        folder: For logs and the state of the simulated machines.
        module: Has the scenarios.

    Returns:
        The outcomes, in the order of the runs.
    """
    environment = machine_environment(folder, devices=2)
    environment["PYTHONPATH"] += f"{os.pathsep}{REPO / 'tests' / 'support'}"
    # A core for each process is more than there is.
    environment["OMP_NUM_THREADS"] = "1"
    count = os.cpu_count() or 1
    idle: queue.SimpleQueue = queue.SimpleQueue()

    def run(number: int, one: Run) -> Outcome:
        bug = f"Bug[{one.bug!r}]" if one.bug else None
        code = f"from sim.tests.doubles.bugs import Bug\nimport {module} as module\n"
        code += f"module.{one.scenario}({bug}, {one.seed})"
        settings = {
            "RBLN_SIM_DEFERRED": one.deferred,
            "RBLN_SIM_FAULTS": FAULTS.get(one.scenario, ""),
            "RBLN_SIM_STATE_DIR": str(folder / f"{number}.npus"),
        }
        fork = idle.get()
        try:
            done = fork(code, environment | settings)
        finally:
            idle.put(fork)
        differs = "WrongBytesError" in done.stderr
        outcome = DIFFERS if differs else BROKEN if done.returncode else RIGHT
        return Outcome(outcome, done.stdout + done.stderr)

    with ExitStack() as stack:
        for number in range(count):
            logs = folder / f"logs {number}"
            logs.mkdir()
            idle.put(stack.enter_context(zygote(environment, logs, module)))
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(run, range(len(runs)), runs))


def assert_no_alarm(runs: Sequence[Run], outcomes: Sequence[Outcome]) -> None:
    """Fail if a run was not right, or wrote anything, and name the first such run.

    Where a scenario has faults, they are told of.
    """
    alarms = [
        f"{run}: {outcome.outcome}\n{outcome.log}"
        for run, outcome in zip(runs, outcomes, strict=True)
        if outcome.outcome != RIGHT or (outcome.log and run.scenario not in FAULTS)
    ]
    assert not alarms, f"{len(alarms)} alarms, the first: {alarms[0]}"
