# SPDX-License-Identifier: Apache-2.0
"""Workers killed while they write leave whole chunks or nothing that passes for one."""

# Standard
from pathlib import Path
import json
import os
import subprocess
import sys

# Third Party
import pytest

rbln_sim = pytest.importorskip("rbln_sim", reason="on the simulator")

pytestmark = pytest.mark.sim

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
KILLS = 100


@pytest.mark.slow
def test_a_hundred_kills(tmp_path: Path) -> None:
    environment = rbln_sim.environment() | {
        "RBLN_SIM_STATE_DIR": str(tmp_path / "npus"),
        "RBLN_SIM_RDS_FILE": str(tmp_path / "nvme.img"),
        "RBLN_SIM_RDS_GIB": "0.01",
        "LMCACHE_DEVICE_BACKEND": "rbln",
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics"),
    }
    environment["PYTHONPATH"] += os.pathsep + str(ROOT / "tests" / "support")
    process = subprocess.run(
        [sys.executable, HERE / "rds_crash_zygote.py", str(KILLS)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    found = json.loads(process.stdout.splitlines()[-1])
    assert found["killed"] == KILLS
    assert found["started well"] == KILLS  # cold, and able to store and restore
    assert "WRONG" not in found
    assert found["whole"] >= KILLS
    assert found["rejected"] > 0  # some kills fell between a payload and its header
