# SPDX-License-Identifier: Apache-2.0
"""Against running LMCache servers and a simulated NPU that another process owns."""

# Standard
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
import json
import os
import re
import subprocess
import sys

# Third Party
from npu_holder import npu_holder, use_npu
import pytest

# First Party
from lmcache.v1.multiprocess.custom_types import RegisterEngineDrivenContextPayload
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
from lmcache_rbln.diagnose.npu import ask_monitor, check_npu
from lmcache_rbln.diagnose.probe import run_probe
from lmcache_rbln.diagnose.report import FAIL
from rbln_sim.pytest_plugin import machine_environment, read_opens
from tests.support.serving.servers import HOST, CacheServer, CacheServerConfig

pytestmark = pytest.mark.sim
CONNECTOR = '{"kv_connector":"RBLNLMCacheConnectorV1","kv_role":"kv_both"}'


@dataclass
class Machine:
    """A simulated machine with an owner of its NPUs and two servers."""

    environment: dict[str, str]
    holder: subprocess.Popen[str]
    engine_driven: CacheServer
    lmcache_driven: CacheServer

    def diagnose(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "lmcache_rbln.diagnose", "--timeout", "300", *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=400,
        )


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("machine")
    environment = machine_environment(folder, devices=2, rds_gib=0)
    for name in [n for n in environment if n.startswith("LMCACHE_")]:
        del environment[name]
    environment |= {"PYTHONHASHSEED": "0", "COLUMNS": "80"}
    servers = [
        CacheServer(
            CacheServerConfig(256, transfer_mode=mode, l1_size_gb=0.1),
            environment,
            folder,
            name=mode,
        )
        for mode in ("engine_driven", "lmcache_driven")
    ]
    with npu_holder(environment) as holder:
        try:
            for server in servers:
                server.start()
            for server in servers:
                server.wait_ready()
            assert use_npu(holder) == "works\n"
            yield Machine(environment, holder, *servers)
        finally:
            for server in servers:
                server.stop()


def opens(machine: Machine) -> list[tuple[int, int]]:
    log = Path(machine.environment["RBLN_SIM_OPEN_LOG"])
    return [(entry.pid, entry.npu) for entry in read_opens(log)]


def test_one_screen_when_all_is_well_and_the_npu_is_left_alone(
    machine: Machine,
) -> None:
    before = opens(machine)
    assert before == [(machine.holder.pid, 0), (machine.holder.pid, 1)]
    server = machine.engine_driven
    done = machine.diagnose(
        *("--block-size", "128"),
        *("--kv-transfer-config", CONNECTOR),
        *("--server", f"127.0.0.1:{server.port}"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "Traceback" not in done.stderr
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines if "/" not in line)
    text = " ".join(done.stdout.split())
    assert "2 simulated (RBLN-CR03), in use: 0, 1 by pid" in text
    assert f"by pid {machine.holder.pid} ({sys.executable} -c"[:60] in text
    assert re.search(rf"127.0.0.1:{server.port} serves engine_driven (ok|skip) ", text)
    assert "chunk of 256 tokens (server), block of 128" in text
    assert lines[-1] == "OK (look at: NPU)"
    assert opens(machine) == before
    assert use_npu(machine.holder) == "works\n"


def test_a_server_in_the_wrong_mode_is_found_over_its_request_channel(
    machine: Machine,
) -> None:
    server = machine.lmcache_driven
    done = machine.diagnose(
        *("--json", "--block-size", "100"),
        *("--server", f"127.0.0.1:{server.port}"),
    )
    assert done.returncode == 1
    checks = {c["name"]: c for c in json.loads(done.stdout)["checks"]}
    failed = {n for n, check in checks.items() if check["status"] == "fail"}
    assert failed == {"server", "chunk and block"}
    assert checks["server"]["found"].endswith("does not serve engine_driven")
    assert "--supported-transfer-mode engine_driven" in checks["server"]["fix"]
    assert "--chunk-size 300" in checks["chunk and block"]["fix"]
    assert checks["NPU"]["details"]["held"][0]["pid"] == machine.holder.pid
    server.process.check_running()


def test_a_server_in_the_wrong_mode_logs_why_it_answers_no_worker(
    machine: Machine,
) -> None:
    server = machine.lmcache_driven
    client = RequestClientFactory.create(f"tcp://{HOST}:{server.port}")
    registration = client.register_kv_cache_engine_driven_context(
        RegisterEngineDrivenContextPayload(
            instance_id=1,
            model_name="model",
            world_size=1,
            block_size=256,
            num_layers=2,
            hidden_dim_size=128,
            dtype_str="float16",
            use_mla=False,
            num_physical_slots=256,
        )
    )
    server.process.wait_ready(
        lambda: "No handler registered" in server.process.log(), 120.0
    )
    with pytest.raises(TimeoutError):
        registration.result(timeout=1)
    client.close()


def test_malformed_visible_npus_are_named(machine: Machine) -> None:
    before = opens(machine)
    environment = machine.environment | {"RBLN_VISIBLE_DEVICES": "zero"}
    words = ("lmcache_rbln.diagnose.probe_main", "runtime")
    torch = run_probe(words, {"config": None}, environment, 300).get("torch")
    result = check_npu(torch, ask_monitor(environment["PATH"]), environment)
    assert torch["simulated"]
    assert result.status == FAIL
    assert result.found == "no NPU is visible with RBLN_VISIBLE_DEVICES=zero"
    assert opens(machine) == before


SECRET = "hunter2-Zx9"
IN_PROCESS: dict[str, Any] = {
    "kv_connector": "RBLNLMCacheConnectorV1",
    "kv_role": "kv_both",
}
RDS = {
    "storage_plugin.R.module_path": "lmcache_rbln.storage_plugin.rds_backend",
    "storage_plugin.R.class_name": "RDSBackend",
}


def checks_of(
    machine: Machine, config: dict[str, Any], **variables: str
) -> dict[str, dict[str, str]]:
    environment = machine.environment | variables
    words = ["--json", "--block-size", "128", "--timeout", "300"]
    done = subprocess.run(
        [sys.executable, "-m", "lmcache_rbln.diagnose", *words]
        + ["--kv-transfer-config", json.dumps(config)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert SECRET not in done.stdout + done.stderr
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_what_the_engine_refuses_fails(machine: Machine) -> None:
    """The settings by one whole command; one by one in ``tests/settings``."""
    extra = RDS | {
        "storage_plugin.Q.module_path": "lmcache_rbln.storage_plugin.rds_backend",
        "storage_plugin.Q.class_name": "RDSBackends",
        "rds_buffer_size": "2048",
        "rds_bufer_size": 64,
        "save_only_first_rank": True,
        "redis_password": SECRET,
    }
    before = opens(machine)
    checks = checks_of(
        machine,
        IN_PROCESS
        | {
            "kv_load_failure_policy": "retry",
            "kv_connector_extra_config": {"lmcache.chunk_size": 200, "pwd": SECRET},
        },
        LMCACHE_STORAGE_PLUGINS="R,Q",
        LMCACHE_ENABLE_SCHEDULER_BYPASS_LOOKUP="True",
        LMCACHE_DEVICE_BACKEND="cuda",
        LMCACHE_EXTRA_CONFIG=json.dumps(extra),
    )
    settings = checks["settings"]
    assert settings["status"] == "fail"
    for part in (
        "RDSBackend works without LMCache's CPU tier",
        "'RDSBackends' of 'lmcache_rbln.storage_plugin.rds_backend' can't be loaded",
        "rds_buffer_size must be a whole number, got '2048'",
        "rds_bufer_size is not a setting",
        "keeping chunks of the first rank only",
        "a scheduler that looks up without the workers",
        "LMCACHE_DEVICE_BACKEND is 'cuda'",
    ):
        assert part in settings["found"], settings
    assert "kv_load_failure_policy" in checks["connector"]["found"]
    assert "in kv_connector_extra_config to 256" in checks["chunk and block"]["fix"]
    assert opens(machine) == before


def test_a_vllm_that_is_broken_fails(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('libcudart')")
    checks = checks_of(
        machine, IN_PROCESS, PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    )
    assert checks["connector"]["status"] == "fail"
    assert "import vllm: ImportError: libcudart" in checks["connector"]["found"]
