# SPDX-License-Identifier: Apache-2.0
"""LMCache's worker over a device that fails: told to vLLM, and nothing stays locked."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterator
from pathlib import Path
import json
import os
import subprocess
import sys

# Third Party
import pytest

# First Party
from examples.rbln_demo.servers import CacheServer, CacheServerConfig
from rbln_sim.pytest_plugin import machine_environment
from tests.support import mp_worker

pytestmark = [pytest.mark.sim, pytest.mark.slow]
WORKER = Path(mp_worker.__file__)
#: The second H2D copy of each layer fails; the first puts the KV cache there.
FAULTS = f"fail:d2h:1,fail:h2d:{mp_worker.LAYERS + 1}"


@pytest.fixture(scope="module", params=["SHM", "pickle"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CacheServer]:
    """A server of each transport."""
    folder = tmp_path_factory.mktemp("server")
    shm = f"rbln_failures_{os.getpid()}" if request.param == "SHM" else ""
    server = CacheServer(
        CacheServerConfig(mp_worker.CHUNK, shm_name=shm, l1_size_gb=0.1),
        {**machine_environment(folder), "PYTHONHASHSEED": "0"},
        folder,
    )
    server.start()
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


@pytest.mark.parametrize("sync", [False, True], ids=["asynchronous", "synchronous"])
def test_failures_reach_vllm_and_leave_nothing_behind(
    server: CacheServer, sync: bool, tmp_path: Path
) -> None:
    server.clear()
    done = subprocess.run(
        [sys.executable, WORKER, str(server.port), str(int(sync))],
        env=machine_environment(tmp_path, faults=FAULTS, seed=1),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    kind = "EngineDrivenTransferContext"
    assert said["context"] == (kind if sync else f"Async{kind}")
    assert said["first store"] is False
    assert said["found after it"] == 0
    assert said["second store"] is True, "its slots were still locked"
    assert said["found then"] == 2
    # vLLM computes these blocks again.
    assert said["first retrieve"] == {"finished": ["d"], "failed": sorted(mp_worker.TO)}
    assert said["found again"] == 2
    assert said["second retrieve"] == {"finished": ["e"], "failed": []}
    assert said["exact"]
    assert said["reserved"] == (2 if server.segment else 0)
    # What the worker reserved and never filled is not there for anybody.
    server.wait_stored(2)
