# SPDX-License-Identifier: Apache-2.0
"""Copies that fail between the paged cache and chunks, on a machine of their own."""

# Standard
from pathlib import Path
from typing import Any
import json
import os
import subprocess
import sys

# Third Party
from rbln_sim.pytest_plugin import machine_environment
import pytest

# The programs say themselves when copies are late.
pytestmark = pytest.mark.sim
HERE = Path(__file__).parent


def run_with_faults(
    folder: Path, program: str, *arguments: object, **settings: object
) -> tuple[dict[str, Any], str]:
    """Run a program on a machine of its own; returns what it printed and stderr."""
    environment = machine_environment(folder, devices=1, **settings)
    support = str(HERE.parents[1] / "tests/support")
    environment["PYTHONPATH"] += os.pathsep + support
    ended = subprocess.run(
        [sys.executable, str(HERE / program), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1]), ended.stderr


# (copies that fail, deferred completion, transfers, copies of each)
SHARED = {
    "one copy each": ("fail:d2d:p=0.005", 0, 1500, 1),
    "many copies": ("fail:d2d:p=0.002", 0, 400, 50),
    "late copies": ("fail:d2d:p=0.01", 1, 100, 2),
}


@pytest.mark.parametrize("case", SHARED)
def test_failures_over_one_callers_stream_are_told_to_whom_they_hit(
    tmp_path: Path, case: str
) -> None:
    faults, deferred, transfers, copies = SHARED[case]
    got, errors = run_with_faults(
        tmp_path,
        "rds_shared_stream.py",
        *(4, transfers, copies),
        faults=faults,
        deferred=deferred,
    )
    assert got["silent"] == got["spurious"] == got["bystander"] == 0
    assert 0 < got["raised"] <= errors.count("strikes d2d")
    assert got["free"] == got["slots"]


def test_waits_that_fail_cost_no_staging_memory(tmp_path: Path) -> None:
    got, errors = run_with_faults(
        tmp_path,
        "rds_shared_stream.py",
        *(4, 1000, 2),
        faults="fail:d2d:p=0.01,fail:sync:p=0.01",
    )
    assert errors.count("strikes sync") > got["bystander"] > 0  # its own
    assert got["silent"] == 0
    assert got["raised"] > 0
    assert got["free"] == got["slots"]


def test_copies_of_the_backend_fail_apart_from_the_engine(tmp_path: Path) -> None:
    got, errors = run_with_faults(
        tmp_path,
        "rds_failing_copies.py",
        *(3, 100),
        faults="fail:d2h:p=0.05,fail:h2d:p=0.05",
    )
    assert errors.count("strikes d2h") > 5 and errors.count("strikes h2d") > 5
    assert got["wrong"] == got["bystander"] == got["lost"] == 0
    assert 300 > got["stored"] > got["restored"] > 100
    assert got["free"] == got["slots"]
