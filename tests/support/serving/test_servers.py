# SPDX-License-Identifier: Apache-2.0
"""What is judged by the servers' logs and leftovers, and where their ports lie."""

# Standard
from pathlib import Path
import os
import sys

# Third Party
from lmcache_release import INLINE_CONTEXT
import pytest

# First Party
from tests.support.serving import servers
from tests.support.serving.processes import ServerFailedError
from tests.support.serving.servers import CacheServer, CacheServerConfig
from tests.support.serving.servers import free_port, transport_of

SHM = "INFO: Creating EngineDrivenContextShm (shm_name=x, pool_size=1)\n"
PICKLE = f"INFO: Creating {INLINE_CONTEXT}\n"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with both console scripts."""
    for name in ("lmcache", "vllm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return tmp_path


def test_cache_server_that_leaves_its_segment_is_reported(programs: Path) -> None:
    name = f"rbln_demo_test_{os.getpid()}"
    server = CacheServer(CacheServerConfig(256, shm_name=name), {}, programs)
    assert server.segment == Path(f"/dev/shm/lmcache_l1_pool_{name}")
    server.segment.touch()
    with pytest.raises(ServerFailedError, match="removed now"):
        server.stop()
    assert not server.segment.exists()


@pytest.mark.parametrize(
    ("log", "transport"),
    [
        ("", None),
        (SHM, "SHM"),
        # The segment could not be mapped: the worker fell back.
        (SHM + "WARNING: Failed to initialize SHM context\n" + PICKLE, "pickle"),
        (PICKLE + SHM, "SHM"),
    ],
)
def test_transport_is_the_one_last_used(log: str, transport: str | None) -> None:
    assert transport_of(log) == transport


def test_ports_lie_below_those_that_the_kernel_hands_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = int(servers.KERNEL_PORTS.read_text().split()[0])
    assert servers.LOWEST_PORT <= free_port() < first
    ports = tmp_path / "ports"
    ports.write_text("1024\t60999\n")
    monkeypatch.setattr(servers, "KERNEL_PORTS", ports)
    assert 1024 <= free_port() <= 65535
