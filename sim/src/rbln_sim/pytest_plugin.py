# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests that start processes on simulated NPUs.

Opt in with ``pytest -p rbln_sim.pytest_plugin``; it is not installed as an entry point,
and loading it changes nothing. Each test gets a simulated machine of its own: its NPUs
are free, whatever else runs, and a log says who opened which.

    @pytest.mark.rbln_sim(devices=2, deferred="latest")
    def test_only_the_worker_opens(rbln_sim_run, rbln_sim_opens):
        rbln_sim_run("import torch; torch.rbln.synchronize()")
        assert [entry.npu for entry in rbln_sim_opens()] == [0, 1]
"""

# Standard
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
import json
import os
import subprocess
import sys
import textwrap

# Third Party
import pytest

# First Party
import rbln_sim

#: What :func:`rbln_sim_run` returns.
RunPython = Callable[..., subprocess.CompletedProcess[str]]

MARKER = "rbln_sim"
SETTINGS = (
    "D2D_GBPS",
    "DEFERRED",
    "DESCRIPTOR_US",
    "DEVICES",
    "FAULTS",
    "GBPS",
    "MEMORY_GIB",
    "OPEN_LOG",
    "PAGEABLE_GBPS",
    "RDS_FAULTS",
    "RDS_FILE",
    "RDS_GIB",
    "SEED",
    "STATE_DIR",
    "SUBMIT_US",
    "TRACE",
)
# Settings of the test's own process would leak into the machine.
_NOT_INHERITED = ("RBLN_", "TORCH_RBLN_", "TORCH_DEVICE_BACKEND")
_OPEN_LOG = "npu-opens.jsonl"
_TIMEOUT_S = 300


@dataclass(frozen=True)
class Open:
    """A process opened an NPU.

    Attributes:
        pid: The process.
        npu: Number of the NPU in the machine.
        time: When, in seconds since 1970.
        argv: The process's command line.
    """

    pid: int
    npu: int
    time: float
    argv: str


def machine_environment(folder: Path, **settings: object) -> dict[str, str]:
    """Return the environment of processes on a simulated machine of their own.

    Args:
        folder: For the machine's state and its log of opened NPUs; made when missing.
        settings: ``RBLN_SIM_*`` variables in lower case and without the prefix, for
            example ``devices=2``.

    Returns:
        This process's environment without its own ``RBLN_*`` settings, with the
        simulated runtime and the settings.

    Raises:
        RuntimeError: A real ``rebel-compiler`` is installed, or the library was not
            built.
        ValueError: There is no such setting.
    """
    environment = {
        name: value
        for name, value in rbln_sim.environment().items()
        if not name.startswith(_NOT_INHERITED)
    }
    package = str(Path(rbln_sim.__file__).parents[1])
    environment["PYTHONPATH"] += os.pathsep + package
    folder.mkdir(parents=True, exist_ok=True)
    environment["RBLN_SIM_STATE_DIR"] = str(folder / "npus")
    environment["RBLN_SIM_OPEN_LOG"] = str(folder / _OPEN_LOG)
    environment["TORCH_RBLN_LOG_LEVEL"] = "ERROR"  # it logs to stdout
    for name, value in settings.items():
        if name.upper() not in SETTINGS:
            known = ", ".join(known.lower() for known in SETTINGS)
            raise ValueError(f"{name!r} is no setting of rbln-sim; known: {known}")
        environment[f"RBLN_SIM_{name.upper()}"] = str(value)
    return environment


def read_opens(log: Path) -> list[Open]:
    """Read a log of opened NPUs.

    Args:
        log: The file that ``RBLN_SIM_OPEN_LOG`` names.

    Returns:
        Its entries in the order of the opens; none if nothing was opened.
    """
    if not log.exists():
        return []
    # A command line is any bytes, and is cut where it is long.
    text = log.read_text(encoding="utf-8", errors="replace")
    return [Open(**json.loads(line)) for line in text.split("\n") if line]


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(**settings): RBLN_SIM_* of the test's simulated machine, in lower "
        "case and without the prefix",
    )


@pytest.fixture
def rbln_sim_environment(
    request: pytest.FixtureRequest, tmp_path: Path
) -> dict[str, str]:
    """Environment of processes on the test's own simulated machine."""
    settings: dict[str, object] = {}
    for marker in reversed(list(request.node.iter_markers(MARKER))):
        settings |= marker.kwargs  # the closest comes last
    return machine_environment(tmp_path / "rbln-sim", **settings)


@pytest.fixture
def rbln_sim_opens(rbln_sim_environment: dict[str, str]) -> Callable[[], list[Open]]:
    """A function that returns who has opened which NPU of the machine so far."""
    log = Path(rbln_sim_environment["RBLN_SIM_OPEN_LOG"])
    return lambda: read_opens(log)


@pytest.fixture
def rbln_sim_run(rbln_sim_environment: dict[str, str]) -> RunPython:
    """A function that runs Python code in a process on the machine.

    It takes the code, and more environment variables as keyword arguments; it returns
    the finished process with its output.
    """

    def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=rbln_sim_environment | variables,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )

    return run
