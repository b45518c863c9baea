# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the simulator's tests."""

# Standard
from collections.abc import Callable, Iterator
from pathlib import Path
import os
import subprocess
import sys
import textwrap

# Third Party
import pytest

# First Party
import rbln_sim

RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let this session own its NPUs, whatever else runs on the machine.

    The setting counts from the process's first use of an NPU on.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "RBLN_SIM_STATE_DIR" not in os.environ:
            folder = tmp_path_factory.mktemp("rbln-sim")
            patch.setenv("RBLN_SIM_STATE_DIR", str(folder))
        yield


@pytest.fixture
def child_environment(tmp_path: Path) -> dict[str, str]:
    """Environment of a process with a simulated machine of its own: one NPU."""
    environment = {
        name: value
        for name, value in rbln_sim.environment().items()
        if not name.startswith(("RBLN_", "TORCH_RBLN_", "TORCH_DEVICE_BACKEND"))
    }
    package = Path(rbln_sim.__file__).parents[1]
    environment["PYTHONPATH"] = f"{environment['PYTHONPATH']}{os.pathsep}{package}"
    environment["RBLN_SIM_STATE_DIR"] = str(tmp_path / "npus")
    environment["TORCH_RBLN_LOG_LEVEL"] = "ERROR"  # it logs to stdout
    return environment


@pytest.fixture
def run_python(child_environment: dict[str, str]) -> RunPython:
    """A function that runs Python code on a simulated machine of its own.

    It takes the code, and settings as keyword arguments; it returns the finished
    process with its output.
    """

    def run(code: str, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=child_environment | settings,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run
