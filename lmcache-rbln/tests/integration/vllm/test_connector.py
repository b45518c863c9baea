# SPDX-License-Identifier: Apache-2.0
"""Starting the connector: refusals come before anything else, in both roles."""

# Standard
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
import asyncio
import logging
import os
import threading
import gc
import weakref

# Third Party
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

# First Party
from lmcache.integration.vllm import front_process
from lmcache.v1.config import LMCacheEngineConfig
from lmcache_rbln._lmcache import in_process
from lmcache_rbln.integration.vllm import connector, requests, service
from lmcache_rbln.integration.vllm.connector import RBLNLMCacheConnectorV1
from lmcache_rbln.settings import Settings

pytestmark = pytest.mark.npu
ROLES = pytest.mark.parametrize("role", ["SCHEDULER", "WORKER"])


def vllm_config(extra: dict[str, Any] | None = None) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=extra or {},
            kv_load_failure_policy="fail",
            engine_id="engine",
        ),
        cache_config=SimpleNamespace(block_size=128),
        parallel_config=SimpleNamespace(world_size=1, rank=0),
    )


@pytest.fixture(autouse=True)
def lmcache_config(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A configuration of the test's own instead of the process's one."""
    config = LMCacheEngineConfig.from_defaults(chunk_size=256)
    monkeypatch.setattr(service, "lmcache_get_or_create_config", lambda: config)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    yield config


def construct(role: str, config: Any) -> Any:
    return RBLNLMCacheConnectorV1(config, KVConnectorRole[role], None)


@ROLES
def test_hash_seed(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED")
    with pytest.raises(ValueError, match="export PYTHONHASHSEED=0"):
        construct(role, vllm_config())


@ROLES
@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"lmcache.enable_blending": "true"}, "unset lmcache.enable_blending in kv_"),
        ({"lmcache.chunk_size": 100}, "set lmcache.chunk_size in .* to 128"),
        ({"lmcache_rbln.degraded": True}, "did you mean lmcache_rbln.allow_degraded"),
    ],
)
def test_settings(
    role: str,
    extra: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def parse() -> Any:
        pytest.fail("LMCache was asked before the settings were checked")

    monkeypatch.setattr(service, "lmcache_get_or_create_config", parse)
    with pytest.raises(ValueError, match=message):
        construct(role, vllm_config(extra))


def test_settings_that_a_configuration_server_gave(lmcache_config: Any) -> None:
    lmcache_config.chunk_size = 100
    with pytest.raises(ValueError, match="chunk size is 100 .*configuration server"):
        construct("WORKER", vllm_config())


@pytest.mark.parametrize("allowed", [False, True])
def test_an_engine_that_cannot_be_made(
    allowed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It stops the worker, or is said at WARNING; then LMCache goes on without it."""

    def fail(*_: Any) -> None:
        raise OSError("no memory for the CPU tier")

    class StockReachedError(Exception):
        pass

    def stock(*_: Any, **__: Any) -> None:
        raise StockReachedError

    monkeypatch.setattr(service, "create_engine", fail)
    monkeypatch.setattr(requests.LMCacheConnectorV1Dynamic, "__init__", stock)
    monkeypatch.setattr(connector.logger, "propagate", True)
    extra = {"lmcache_rbln.allow_degraded": allowed}
    wanted: type[Exception] = StockReachedError if allowed else OSError
    with caplog.at_level(logging.WARNING), pytest.raises(wanted):
        construct("WORKER", vllm_config(extra))
    said = [
        record
        for record in caplog.records
        if "everything is recomputed" in record.getMessage()
    ]
    assert len(said) == allowed
    if allowed:
        assert said[0].levelno == logging.WARNING
        assert "no memory for the CPU tier" in said[0].getMessage()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_the_scheduler_recomputes_unless_told_otherwise(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StockReachedError(Exception):
        pass

    def stock(*_: Any, **__: Any) -> None:
        raise StockReachedError

    monkeypatch.setattr(requests.LMCacheConnectorV1Dynamic, "__init__", stock)
    extra = (
        {} if policy == "recompute" else {"lmcache_rbln.load_failure_policy": "fail"}
    )
    config = vllm_config(extra)
    with pytest.raises(StockReachedError):
        construct("SCHEDULER", config)
    assert config.kv_transfer_config.kv_load_failure_policy == policy


@pytest.mark.parametrize("given", [None, [0]])
def test_every_rank_keeps_and_looks_up_its_own_chunks(
    given: list[int] | None, lmcache_config: Any
) -> None:
    lmcache_config.lookup_server_worker_ids = given
    config = vllm_config()
    config.parallel_config.world_size = 2
    made = service.engine_config(config)
    assert made is lmcache_config
    assert made.extra_config == {"save_only_first_rank": False}
    assert made.lookup_server_worker_ids == (given or [0, 1])


def test_lmcaches_api_sets_nothing(lmcache_config: Any) -> None:
    """POST /conf of its internal API server, off by default."""
    conf_api = in_process("v1.internal_api_server.vllm.conf_api")

    config = service.engine_config(vllm_config())
    state = SimpleNamespace(lmcache_adapter=SimpleNamespace(config=config))

    async def body() -> dict[str, Any]:
        return {"use_layerwise": True, "chunk_size": 7}

    request: Any = SimpleNamespace(app=SimpleNamespace(state=state), json=body)
    answer = asyncio.run(conf_api.set_config(request))
    assert answer.status_code == 400
    assert b"not mutable" in answer.body
    assert (config.use_layerwise, config.chunk_size) == (False, 256)


class Manager:
    """LMCache's manager, as far as the connector asks it."""

    def __init__(self, healthy: bool, backends: list[str]) -> None:
        self._healthy = healthy
        self._init_failed_reason = "" if healthy else "KeyError: LocalCPUBackend"
        self.lmcache_engine = SimpleNamespace(
            config=LMCacheEngineConfig.from_defaults(storage_plugins=["Plugin"]),
            storage_manager=SimpleNamespace(storage_backends=dict.fromkeys(backends)),
            metadata=SimpleNamespace(
                get_shapes=lambda: [torch.Size([2, 2, 4, 8])],
                get_dtypes=lambda: [torch.float16],
            ),
        )

    def is_healthy(self) -> bool:
        return self._healthy


def connector_over(manager: Manager, allow_degraded: bool) -> Any:
    made = RBLNLMCacheConnectorV1.__new__(RBLNLMCacheConnectorV1)
    made._settings = Settings(allow_degraded=allow_degraded)
    made._shutdown_once = threading.Lock()
    made._paged_kv = None
    made._failures = ["Failed to create backend Plugin: rds_x must be 1"]
    closed: list[bool] = []
    engine: Any = SimpleNamespace(
        _manager=manager,
        lmcache_engine=manager.lmcache_engine,
        shutdown=lambda: closed.append(True),
        closed=closed,
    )
    made._lmcache_engine = engine
    return made


@pytest.mark.parametrize(
    ("manager", "reason"),
    [
        ((False, ["Plugin"]), "KeyError: LocalCPUBackend"),
        ((True, ["LocalCPUBackend"]), "storage backend Plugin is configured"),
    ],
)
def test_recompute_mode_stops_or_is_said(
    manager: tuple[bool, list[str]],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused = connector_over(Manager(*manager), False)
    with pytest.raises(RuntimeError, match=f"{reason}.*rds_x.*allow_degraded"):
        refused._require_healthy()

    monkeypatch.setattr(connector.logger, "propagate", True)
    allowed = connector_over(Manager(*manager), True)
    with caplog.at_level(logging.WARNING):
        allowed._require_healthy()
    assert reason in caplog.text
    assert "everything is recomputed" in caplog.text
    assert not allowed._lmcache_engine.closed


def test_a_healthy_start_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    made = connector_over(Manager(True, ["Plugin"]), False)
    with caplog.at_level(logging.WARNING):
        made._require_healthy()
    assert not caplog.records


def test_kernel_blocks_unlike_the_scheduler_s_stop_the_registration() -> None:
    connector = RBLNLMCacheConnectorV1.__new__(RBLNLMCacheConnectorV1)
    stops: list[None] = []
    parts: dict[str, Any] = {
        "_vllm_config": vllm_config(),
        "_paged_kv": SimpleNamespace(
            register=lambda _: SimpleNamespace(desc=SimpleNamespace(bs=64))
        ),
        "shutdown": lambda: stops.append(None),
    }
    for name, part in parts.items():
        setattr(connector, name, part)
    with pytest.raises(ValueError, match="blocks of 64 tokens, wanted .* size 128"):
        connector.register_kv_caches({"layer.0": torch.zeros(1)})
    assert stops


@pytest.mark.parametrize(
    ("computed", "limit", "wanted"),
    [
        # tokens that the NPU holds, max_tokens_per_load, tokens to load
        (0, 0, 1023),
        (0, 256, 256),
        (128, 256, 128),
        (128, 512, 384),
        (384, 256, 128),
        (200, 256, 56),
        (896, 256, 127),
    ],
)
def test_a_limit_on_loads_behind_a_cached_prefix(
    computed: int, limit: int, wanted: int
) -> None:
    """vLLM is promised what LMCache will load; LMCache ends the engine otherwise."""
    impl = in_process("integration.vllm.vllm_v1_adapter").LMCacheConnectorV1Impl
    implementation: Any = impl.__new__(impl)
    implementation.kv_role = "kv_both"
    # A prompt of 1,024 tokens that LMCache holds as a whole.
    implementation._manager = SimpleNamespace(
        lookup_client=SimpleNamespace(
            lookup_cache=lambda lookup_id: 1024, clear_lookup_status=lambda _: None
        )
    )
    implementation.config = SimpleNamespace(min_retrieve_tokens=0)
    implementation._max_tokens_per_load = limit
    implementation._lmcache_chunk_size = 256
    implementation.load_specs = {}
    implementation._unfinished_requests = {}
    made: Any = RBLNLMCacheConnectorV1.__new__(RBLNLMCacheConnectorV1)
    made._lmcache_engine, made._views = implementation, {}
    request: Any = SimpleNamespace(
        request_id="r",
        num_tokens=1024,
        kv_transfer_params=None,
        cache_salt=None,
        lora_request=None,
        prompt_embeds=None,
        skip_reading_prefix_cache=False,
    )
    tokens, later = made.get_num_new_matched_tokens(request, computed)
    assert (tokens, later) == (wanted, False)
    made.update_state_after_alloc(request, None, tokens)
    assert implementation.load_specs["r"].can_load


def test_a_start_that_fails_half_way_ends_what_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stock(*_: Any, **__: Any) -> None:
        raise OSError("no socket")

    destroyed: list[bool] = []
    left: list[Exception] = []
    monkeypatch.setattr(service, "create_engine", lambda *_: object())
    monkeypatch.setattr(service, "destroy_engine", lambda: destroyed.append(True))
    monkeypatch.setattr(front_process, "leave_reason", left.append)
    monkeypatch.setattr(requests.LMCacheConnectorV1Dynamic, "__init__", stock)
    before = set(connector._open)
    with pytest.raises(OSError, match="no socket") as caught:
        construct("WORKER", vllm_config())
    assert destroyed == [True]
    assert left == [caught.value]
    assert set(connector._open) == before


@ROLES
def test_the_scheduler_starts_last_and_forgets_an_earlier_refusal(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stock(made: Any, *_: Any, **__: Any) -> None:
        made._lmcache_engine = SimpleNamespace(shutdown=lambda: None)

    forgotten: list[bool] = []
    monkeypatch.setattr(front_process, "forget_reason", lambda: forgotten.append(True))
    monkeypatch.setattr(service, "create_engine", lambda *_: None)
    monkeypatch.setattr(service, "start_problems", lambda _: [])
    monkeypatch.setattr(requests.LMCacheConnectorV1Dynamic, "__init__", stock)
    connector._open.discard(construct(role, vllm_config()))
    assert forgotten == [True] * (role == "SCHEDULER")


def test_nothing_is_begun_before_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*_: Any, **__: Any) -> None:
        raise AssertionError("began")

    monkeypatch.setattr(service, "create_engine", begin)
    monkeypatch.setattr(service, "destroy_engine", begin)
    monkeypatch.setattr(requests.LMCacheConnectorV1Dynamic, "__init__", begin)
    config = vllm_config()
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ValueError, match="--pipeline-parallel-size 1"):
        construct("WORKER", config)


def test_the_end_of_the_process_shuts_open_connectors_down_once() -> None:
    made = connector_over(Manager(True, ["Plugin"]), False)
    connector._open.add(made)
    connector._shut_down_open_connectors()
    made.shutdown()
    assert made._lmcache_engine.closed == [True]
    assert made not in connector._open


def test_a_forked_child_leaves_its_parent_s_connectors_alone() -> None:
    made = connector_over(Manager(True, ["Plugin"]), False)
    connector._open.add(made)
    child = os.fork()
    if child == 0:
        connector._shut_down_open_connectors()
        os._exit(len(made._lmcache_engine.closed))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    connector._open.discard(made)


def test_an_open_connector_is_not_kept_alive() -> None:
    """It holds the KV cache, which a program with several engines needs back."""
    made = connector_over(Manager(True, ["Plugin"]), False)
    connector._open.add(made)
    alive = weakref.ref(made)
    del made
    gc.collect()
    assert alive() is None
