# SPDX-License-Identifier: Apache-2.0
"""A failure is told to the transfer that it hit, and to nobody else."""

# Standard
from pathlib import Path
from typing import Any
import json
import os
import re
import subprocess
import sys
import threading

# Third Party
from rbln_sim.pytest_plugin import machine_environment
import pytest
import torch

# First Party
from lmcache_rbln.device_streams import DeviceStreams, InFlightError

HERE = Path(__file__).parent
DEVICE = torch.device("rbln:0")
STRUCK = re.compile(r"rbln-sim: fault ")


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


@pytest.mark.sim
def test_x(tmp_path: Path) -> None:
    got, errors = run_with_faults(
        tmp_path, "rds_shared_stream.py", 4, 20_000, faults="fail:d2d:p=0.002"
    )
    print(got, errors[:1000])
    assert 0
