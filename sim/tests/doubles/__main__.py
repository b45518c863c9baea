# SPDX-License-Identifier: Apache-2.0
"""Runs scenarios, each in a process of its own with a simulated machine of its own.

A schedule counts from a process's first use of an NPU on, and starting Python with
torch takes seconds. So this process imports everything once, never uses an NPU, and
forks a child for each run. Its arguments: a file with the runs, a file for their
outcomes, a folder, and how many children may run at once.
"""

# Standard
from collections.abc import Callable
from pathlib import Path
from typing import Any
import json
import os
import resource
import signal
import sys
import traceback

# Third Party
import torch

# First Party
from sim.tests.doubles.addresses import CallRefusedError
from sim.tests.doubles.bugs import CRASHED, DIFFERS, REFUSED, Bug
from sim.tests.doubles.scenarios import SCENARIOS, WrongBytesError

TIME_LIMIT_S = 300
RIGHT, BROKEN = "right", "broken"


def scenario_named(name: str) -> Callable[[Bug | None, int], None]:
    """Return a scenario; the one of the product's backend needs the product."""
    if name == "backend":
        # First Party
        from sim.tests.doubles.backend import backend

        return backend
    return SCENARIOS[name]


def run_here(run: dict[str, Any]) -> str:
    """Run one scenario in this process.

    Args:
        run: ``scenario``, ``bug`` (a name, or none), ``seed`` and ``deferred``.

    Returns:
        ``right``, ``differs``, ``refused``, or ``broken`` for every other error; what
        happened is printed.
    """
    bug = Bug[run["bug"]] if run["bug"] else None
    try:
        scenario_named(run["scenario"])(bug, run["seed"])
    except WrongBytesError as error:
        print(error)
        return DIFFERS
    except CallRefusedError as error:
        print(error)
        return REFUSED
    except Exception:
        traceback.print_exc()
        return BROKEN
    return RIGHT


def start(number: int, run: dict[str, Any], folder: Path) -> int:
    """Fork a child that runs a scenario and return its process id."""
    child = os.fork()
    if child:
        return child
    try:
        signal.alarm(TIME_LIMIT_S)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.environ["RBLN_SIM_DEFERRED"] = run["deferred"]
        os.environ["RBLN_SIM_FAULTS"] = run["faults"]
        os.environ["RBLN_SIM_STATE_DIR"] = str(folder / f"{number}.npus")
        log = os.open(folder / f"{number}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        outcome = run_here(run)
        (folder / f"{number}.outcome").write_text(outcome)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def collect(number: int, status: int, folder: Path) -> dict[str, str]:
    """Return what became of a child."""
    code = os.waitstatus_to_exitcode(status)
    log = folder / f"{number}.log"
    result = {"outcome": BROKEN, "log": log.read_text() if log.exists() else ""}
    if code == -signal.SIGSEGV:
        result["outcome"] = CRASHED
    elif code == 0 and (folder / f"{number}.outcome").exists():
        result["outcome"] = (folder / f"{number}.outcome").read_text()
    else:
        result["log"] += f"ended with status {code}"
    return result


def main() -> None:
    """Run everything and write the outcomes down in the order of the runs."""
    runs_file, outcomes_file, folder = map(Path, sys.argv[1:4])
    at_once = int(sys.argv[4])
    runs = json.loads(runs_file.read_text())
    torch.set_num_threads(1)
    for name in {run["scenario"] for run in runs}:
        scenario_named(name)  # imports what it needs
    outcomes: dict[int, dict[str, str]] = {}
    running: dict[int, int] = {}
    for number, run in enumerate(runs):
        while len(running) >= at_once:
            reap(running, outcomes, folder)
        running[start(number, run, folder)] = number
    while running:
        reap(running, outcomes, folder)
    outcomes_file.write_text(json.dumps([outcomes[i] for i in range(len(runs))]))


def reap(
    running: dict[int, int], outcomes: dict[int, dict[str, str]], folder: Path
) -> None:
    """Wait until one child has ended and keep what became of it."""
    child, status = os.wait()
    number = running.pop(child)
    outcomes[number] = collect(number, status, folder)


if __name__ == "__main__":
    main()
