# SPDX-License-Identifier: Apache-2.0
"""The scripts of the hardware pipeline, run here on whatever runtime there is."""

# Standard
from pathlib import Path
import json
import os
import subprocess
import sys

# Third Party
import psutil
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PIPELINE = ROOT / ".buildkite" / "k3_tests" / "rbln"
SCRIPTS = sorted(PIPELINE.glob("run-*.sh"))


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """As on an agent, with simulated NPUs that nobody else holds."""
    return {
        **os.environ,
        "RBLN_PYTHON": sys.executable,
        "RBLN_RUNTIME": "auto",
        "RBLN_ARTIFACTS": str(tmp_path / "artifacts"),
        "RBLN_INSTALL": "0",
        "RBLN_SIM_STATE_DIR": str(tmp_path / "npu-state"),
    }


def run(
    script: str, env: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run a script from another folder than the repository's."""
    return subprocess.run(
        [str(PIPELINE / script), *arguments],
        env=env,
        cwd="/",
        capture_output=True,
        text=True,
    )


def test_pipeline_runs_every_script_in_order() -> None:
    pipeline = yaml.safe_load((PIPELINE / "pipeline.yml").read_text())
    assert pipeline["agents"] == {"queue": "rbln"}
    assert pipeline["env"]["RBLN_RUNTIME"] == "npu", "never the simulator"
    steps = pipeline["steps"]
    assert [ROOT / step["command"] for step in steps] == [
        PIPELINE / name
        for name in ("run-preflight.sh", "run-device-tests.sh", "run-e2e.sh")
    ]
    assert {ROOT / step["command"] for step in steps} == set(SCRIPTS)
    for before, after in zip(steps, steps[1:], strict=False):
        assert after["depends_on"] == before["key"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_executable_bash(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env bash\n# SPDX-License")
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_unknown_runtime_is_refused(script: Path, env: dict[str, str]) -> None:
    ended = run(script.name, env | {"RBLN_RUNTIME": "gpu"})
    assert ended.returncode == 2
    assert "RBLN_RUNTIME must be auto, sim or npu, got 'gpu'" in ended.stderr


def test_unknown_part_is_refused(env: dict[str, str]) -> None:
    ended = run("run-e2e.sh", env, "everything")
    assert ended.returncode == 2
    assert "usage: run-e2e.sh" in ended.stderr


@pytest.mark.npu
@pytest.mark.slow
def test_preflight_is_ready(env: dict[str, str]) -> None:
    ended = run("run-preflight.sh", env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "verdict: READY on " in ended.stdout
    saved = Path(env["RBLN_ARTIFACTS"]) / "preflight.json"
    result = json.loads(saved.read_text())
    assert result["ready"] is True
    assert {"torch", "lmcache", "NPU opens"} <= {c["name"] for c in result["checks"]}


@pytest.mark.sim
@pytest.mark.slow
def test_preflight_for_hardware_refuses_the_simulator(env: dict[str, str]) -> None:
    ended = run("run-preflight.sh", env | {"RBLN_RUNTIME": "npu"})
    assert ended.returncode == 1
    assert "runtime npu: rebel-compiler is not installed" in ended.stdout
    assert "verdict: NOT READY" in ended.stdout


@pytest.mark.npu
@pytest.mark.slow
def test_device_tests_run(env: dict[str, str]) -> None:
    ended = run("run-device-tests.sh", env, "--collect-only", "-q")
    assert ended.returncode == 1, "collecting is not running"
    assert "tests ran" in ended.stderr

    ended = run("run-device-tests.sh", env, "-k", "test_every_value_lands")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout
    assert (Path(env["RBLN_ARTIFACTS"]) / "device-tests.xml").exists()


@pytest.mark.npu
@pytest.mark.slow
def test_demo_runs_and_leaves_nothing(env: dict[str, str]) -> None:
    small = ("--prompts", "2", "--prompt-tokens", "900", "--max-tokens", "4")
    ended = run("run-e2e.sh", env, "demo", *small)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "tokens restored     1,536 of 1,536" in ended.stdout
    assert "outputs equal       2 of 2" in ended.stdout
    assert "transport           shared memory" in ended.stdout
    # Other demos may run on this machine; the name ends with the process.
    segments = Path("/dev/shm").glob("lmcache_l1_pool_rbln_demo_*")
    ids = [int(segment.name.rpartition("_")[2]) for segment in segments]
    assert all(map(psutil.pid_exists, ids))
