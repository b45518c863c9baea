# SPDX-License-Identifier: Apache-2.0
"""Which NPU the tests of this repository take, and what they do without one."""

# Standard
from collections.abc import Iterator, Mapping
from pathlib import Path
import os
import re
import subprocess
import sys

# Third Party
from npu_holder import npu_holder
import pytest

rbln_sim = pytest.importorskip("rbln_sim")

ROOT = Path(__file__).resolve().parents[1]
# One that needs a device, and takes a moment.
A_DEVICE_TEST = "tests/v1/platform/devices/rbln/test_rbln_spec.py::test_rbln_is_chosen"


def run(env: Mapping[str, str], *arguments: str) -> tuple[int, str]:
    """Run pytest on one test of a device."""
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, *arguments, A_DEVICE_TEST],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.fixture
def npu_host(tmp_path: Path) -> dict[str, str]:
    """A host with the vendor's stack: its NPU and runtime are the simulator's."""
    installed = tmp_path / "rebel_compiler-0.12.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: rebel-compiler\nVersion: 0.12.0\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("RBLN_SIM_")}
    return env | {
        "PYTHONPATH": str(tmp_path),
        "LD_LIBRARY_PATH": rbln_sim.environment({})["LD_LIBRARY_PATH"],
        "RBLN_SIM_STATE_DIR": str(tmp_path / "npus"),
    }


@pytest.fixture
def held(npu_host: dict[str, str]) -> Iterator[int]:
    """Process that holds the host's only NPU."""
    with npu_holder(npu_host) as holder:
        yield holder.pid


def test_a_held_npu_skips_the_tests_with_the_reason(
    npu_host: dict[str, str], held: int
) -> None:
    status, output = run(npu_host)
    assert status == 0, output
    assert "3 skipped" in output, output
    reason = f"no NPU can be opened: .*NPU 0 is held by pid {held}"
    assert re.search(rf"SKIPPED .*{reason}", output), output


def test_a_free_npu_is_taken(npu_host: dict[str, str]) -> None:
    status, output = run(npu_host, "--collect-only")
    assert status == 0, output
    assert "RBLN runtime: NPU (RBLN-CR03 1)" in output, output


def test_insisting_on_what_is_not_there_is_an_error(
    npu_host: dict[str, str], held: int
) -> None:
    status, output = run(npu_host, "--runtime", "npu")
    assert status == pytest.ExitCode.USAGE_ERROR, output
    assert f"held by pid {held}" in output
    status, output = run(npu_host, "--runtime", "sim")
    assert status == pytest.ExitCode.USAGE_ERROR, output
    assert "rebel-compiler 0.12.0 is installed" in output
