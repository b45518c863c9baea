# SPDX-License-Identifier: Apache-2.0
"""What opens no NPU: imports, help texts, and a server from start to stop.

That the scheduler opens none and the worker its visible ones is in ``test_devices``.
"""

# Standard
from pathlib import Path
import signal
import subprocess
import sys

# Third Party
import pytest

# First Party
from tests.support.serving.servers import CacheServer, CacheServerConfig

pytestmark = pytest.mark.sim

IMPORTS = """
import lmcache
import lmcache.cli.main
import lmcache.v1.platform.devices.rbln.device_ops
import lmcache_rbln
import torch
assert torch.rbln.is_available() and torch.rbln.device_count() == 2
"""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """Environment of processes on a simulated machine with two NPUs."""
    # First Party
    from rbln_sim.pytest_plugin import machine_environment

    return machine_environment(tmp_path / "machine", devices=2)


def opens(machine: dict[str, str]) -> str:
    """The machine's log of opened NPUs."""
    log = Path(machine["RBLN_SIM_OPEN_LOG"])
    return log.read_text() if log.exists() else ""


def run(machine: dict[str, str], folder: Path, *arguments: str) -> None:
    """Run Python on the machine."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=machine,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


def test_looking_opens_nothing(machine: dict[str, str], tmp_path: Path) -> None:
    run(machine, tmp_path, "-c", IMPORTS)
    run(machine, tmp_path, "-m", "lmcache.cli.main", "server", "--help")
    assert opens(machine) == ""
    # The log does tell of a use.
    run(machine, tmp_path, "-c", f"{IMPORTS}torch.rbln.synchronize()")
    told = opens(machine)
    assert [f'"npu": {npu},' in told for npu in range(3)] == [True, True, False]


def test_a_server_opens_nothing_from_start_to_stop(
    machine: dict[str, str], tmp_path: Path
) -> None:
    server = CacheServer(CacheServerConfig(chunk_size=256), machine, tmp_path)
    server.start()
    try:
        server.wait_ready()
        assert opens(machine) == ""
    finally:
        killed = not server.process.stop()
    log = server.process.log()
    assert server.process.wait_ended(0.0) in (0, -signal.SIGTERM), log
    assert not killed, log
    assert opens(machine) == ""
    assert "rbln-sim" not in log, "nothing was asked of the NPU and refused either"
