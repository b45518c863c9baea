# SPDX-License-Identifier: Apache-2.0
"""The commands of both servers, and what is read from their logs."""

# Standard
from pathlib import Path
from types import SimpleNamespace
import json
import os
import socket
import sys

# Third Party
import pytest

# First Party
from tests.support.serving import servers
from tests.support.serving.processes import ServerFailedError, ServerProcess
from tests.support.serving.servers import (
    CacheServer,
    CacheServerConfig,
    Engine,
    EngineConfig,
    free_port,
    transport_of,
)

SHM = "INFO: Creating EngineDrivenContextShm (shm_name=x, pool_size=1)\n"
PICKLE = "INFO: Creating EngineDrivenContextPickle (pickle transport)\n"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with both console scripts."""
    for name in ("lmcache", "vllm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return tmp_path


def value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_cache_server_command_is_the_documented_one(programs: Path) -> None:
    config = CacheServerConfig(512, shm_name="kv", extra_args=("--max-workers", "2"))
    server = CacheServer(config, {}, programs, port=6555)
    command = server.process.command
    assert command[:2] == [str(programs / "lmcache"), "server"]
    assert value(command, "--port") == "6555"
    assert value(command, "--l1-size-gb") == "1"
    assert value(command, "--eviction-policy") == "LRU"
    assert value(command, "--chunk-size") == "512"
    assert value(command, "--supported-transfer-mode") == "engine_driven"
    assert value(command, "--shm-name") == "kv"
    assert command[-2:] == ["--max-workers", "2"]
    assert server.segment == Path("/dev/shm/lmcache_l1_pool_kv")


def test_without_a_segment_kv_goes_by_pickle(programs: Path) -> None:
    server = CacheServer(CacheServerConfig(256), {}, programs)
    assert "--shm-name" not in server.process.command
    assert server.segment is None


def test_engine_command_is_the_documented_one(programs: Path) -> None:
    config = EngineConfig(
        Path("/models/tiny"),
        256,
        1024,
        2,
        9,
        connector_config={"lmcache.mp.x": 1},
        prefix_caching=None,
    )
    command = Engine(config, 6555, {}, programs).process.command
    assert command[:3] == [str(programs / "vllm"), "serve", "/models/tiny"]
    assert value(command, "--model-impl") == "vllm"
    assert value(command, "--block-size") == "256"
    assert not [word for word in command if "prefix-caching" in word]
    assert json.loads(value(command, "--kv-transfer-config")) == {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": 6555,
            "lmcache.mp.x": 1,
        },
    }


@pytest.mark.parametrize(
    ("prefix_caching", "flag"),
    [(True, "--enable-prefix-caching"), (False, "--no-enable-prefix-caching")],
)
def test_engine_command_says_what_is_not_the_default(
    programs: Path, prefix_caching: bool, flag: str
) -> None:
    config = EngineConfig(
        Path("/models/tiny"),
        256,
        1024,
        2,
        9,
        prefix_caching=prefix_caching,
        load_failure_policy="recompute",
    )
    command = Engine(config, 6555, {}, programs).process.command
    assert [word for word in command if "prefix-caching" in word] == [flag]
    transfer = json.loads(value(command, "--kv-transfer-config"))
    assert transfer["kv_load_failure_policy"] == "recompute"


def test_missing_program_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ServerFailedError, match="lmcache does not exist: install"):
        CacheServer(CacheServerConfig(256), {}, tmp_path)


def test_engine_that_dies_says_why_its_request_failed(programs: Path) -> None:
    engine = Engine(EngineConfig(programs, 256, 1024, 2, 9), 6555, {}, programs)
    engine.process = ServerProcess(
        "vllm serve",
        ["python3", "-S", "-c", "raise MemoryError('no KV blocks left')"],
        dict(os.environ),
        programs / "log",
        programs,
    )
    engine.process.start()
    with pytest.raises(ServerFailedError) as failure:
        engine.complete([[1, 2, 3]], 1)
    assert "vllm serve died: connection to vLLM lost" in str(failure.value)
    assert "reason: MemoryError: no KV blocks left" in str(failure.value)


def test_cache_server_that_leaves_its_segment_is_reported(programs: Path) -> None:
    name = f"rbln_demo_test_{os.getpid()}"
    server = CacheServer(CacheServerConfig(256, shm_name=name), {}, programs)
    assert server.segment is not None
    server.segment.touch()
    with pytest.raises(ServerFailedError, match="removed now"):
        server.stop()
    assert not server.segment.exists()


@pytest.mark.parametrize(
    ("log", "transport"),
    [
        ("", None),
        (SHM, "SHM"),
        (PICKLE, "pickle"),
        # The segment could not be mapped: the worker fell back.
        (SHM + "WARNING: Failed to initialize SHM context\n" + PICKLE, "pickle"),
        (PICKLE + SHM, "SHM"),
    ],
)
def test_transport_is_the_one_last_used(log: str, transport: str | None) -> None:
    assert transport_of(log) == transport


def test_free_ports_differ_from_those_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    first = int(servers.KERNEL_PORTS.read_text().split()[0])
    with socket.socket() as used:
        port = free_port()
        assert servers.LOWEST_PORT <= port < first
        used.bind((servers.HOST, port))
        # Listened to or not, it is taken.
        offered = iter([port] * 99 + [port + 1 if port + 1 < first else port - 1])
        chance = SimpleNamespace(randrange=lambda low, high: next(offered))
        monkeypatch.setattr(servers, "_chance", chance)
        assert free_port() != port


def test_where_the_kernel_hands_out_all_ports_it_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ports = tmp_path / "ports"
    ports.write_text("1024\t60999\n")
    monkeypatch.setattr(servers, "KERNEL_PORTS", ports)
    assert 1024 <= free_port() <= 65535
