# SPDX-License-Identifier: Apache-2.0
"""A server that was left at its default transfer mode."""

# Standard
from pathlib import Path

# Third Party
import pytest

# First Party
from examples.rbln_demo.runtime import Runtime, own_machine, serving_environment
from examples.rbln_demo.servers import HOST, CacheServer, CacheServerConfig
from lmcache.v1.multiprocess.custom_types import RegisterEngineDrivenContextPayload
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory


def test_it_does_not_answer_an_rbln_worker_and_logs_why(
    runtime: Runtime, tmp_path: Path
) -> None:
    env = serving_environment(runtime, tmp_path, "rbln") | own_machine(tmp_path)
    config = CacheServerConfig(
        256, transfer_mode="lmcache_driven", shm_name="", l1_size_gb=0.25
    )
    server = CacheServer(config, env, tmp_path)
    server.start()
    try:
        server.wait_ready()
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
        with pytest.raises(TimeoutError):
            registration.result(timeout=5)
        client.close()
    finally:
        server.stop()
    log = next(tmp_path.glob("*.log")).read_text(encoding="utf-8")
    assert "No handler registered" in log
