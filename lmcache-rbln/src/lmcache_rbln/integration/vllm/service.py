# SPDX-License-Identifier: Apache-2.0
"""LMCache's engine for RBLN, made before LMCache would make its own.

LMCache has no connector for RBLN's paged KV cache and, where it can't make one, serves
on without a cache. An engine that exists under the name it looks for is used as it is.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
import logging
import os

# Third Party
from vllm.distributed.parallel_state import get_tp_group
import torch

# First Party
from lmcache.integration.vllm.utils import ENGINE_NAME, lmcache_get_or_create_config
from lmcache.logging import init_logger
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.config_base import validate_and_set_config_value
from lmcache_rbln._lmcache import (
    LMCacheEngine,
    LMCacheEngineBuilder,
    PinMonitor,
    ServiceKind,
    VllmServiceFactory,
    get_zmq_rpc_path_lmcache,
)
from lmcache_rbln.integration.vllm import private_names, startup_checks
from lmcache_rbln.paged_kv import RBLNPagedKVConnector, TransferFailedError
from lmcache_rbln.settings.table import definitions

if TYPE_CHECKING:
    # Third Party
    from vllm.config import VllmConfig

logger = init_logger(__name__)

_LMCACHE_PREFIX = "lmcache."
_EXTRA_CONFIG = "lmcache.extra_config"
#: LMCache's default for MLA under tensor parallelism sends chunks from rank to rank
#: through device memory, by device indices that RBLN workers do not have.
SAVE_ONLY_FIRST_RANK = "save_only_first_rank"
#: Where LMCache says why it could not make a storage backend.
_BACKEND_LOGGERS = (
    "lmcache.v1.storage_backend",
    "lmcache.v1.storage_backend.remote_backend",
)


def engine_config(vllm_config: VllmConfig) -> LMCacheEngineConfig:
    """Return LMCache's configuration of this process.

    Args:
        vllm_config: Its ``kv_connector_extra_config`` may override settings
            (``lmcache.*``).

    Returns:
        The one object that LMCache uses too.
    """
    config = lmcache_get_or_create_config()
    transfer_config = vllm_config.kv_transfer_config
    assert transfer_config is not None
    for key, value in transfer_config.kv_connector_extra_config.items():
        name = key.removeprefix(_LMCACHE_PREFIX)
        if name != key and hasattr(config, name):
            validate_and_set_config_value(config, name, value)
    # Every rank stores and loads its own copy, so a hit is what all of them have.
    config.extra_config = {SAVE_ONLY_FIRST_RANK: False, **(config.extra_config or {})}
    if _EXTRA_CONFIG in transfer_config.kv_connector_extra_config:
        # LMCache applies these once more, and would take that out again.
        transfer_config.kv_connector_extra_config[_EXTRA_CONFIG] = config.extra_config
    for definition in definitions().values():
        # LMCache's API (POST /conf) would set, while serving, what is refused at start.
        definition["mutable"] = False
    if not config.lookup_server_worker_ids:
        config.lookup_server_worker_ids = list(
            range(vllm_config.parallel_config.world_size)
        )
    return config


def socket_paths(config: LMCacheEngineConfig, vllm_config: VllmConfig) -> list[str]:
    """List the files of the sockets that LMCache may bind in this process.

    Args:
        config: LMCache's configuration.
        vllm_config: vLLM's configuration.

    Returns:
        Those of this rank, as worker and as scheduler.
    """
    transfer_config = vllm_config.kv_transfer_config
    assert transfer_config is not None and transfer_config.engine_id is not None
    lookup = transfer_config.kv_connector_extra_config.get("lmcache_rpc_port", 0)
    offload = int(os.environ.get("LMCACHE_OFFLOAD_RPC_PORT", 100))
    rank = vllm_config.parallel_config.rank
    services: list[tuple[ServiceKind, Any]] = [
        ("lookup", lookup),
        ("lookup_worker", lookup),
        ("lookup_scheduler", lookup),
        ("offload", offload),
    ]
    paths = [
        get_zmq_rpc_path_lmcache(transfer_config.engine_id, name, port, rank)
        for name, port in services
    ]
    prefix = config.internal_api_server_socket_path_prefix
    if prefix and config.internal_api_server_enabled:
        first = config.internal_api_server_port_start
        paths += [f"{prefix}_{first}", f"{prefix}_{first + 1 + rank}"]
    return paths


def create_engine(
    config: LMCacheEngineConfig, vllm_config: VllmConfig
) -> RBLNPagedKVConnector:
    """Make the worker's engine.

    Args:
        config: LMCache's configuration.
        vllm_config: vLLM's configuration.

    Returns:
        The engine's connector to the paged KV cache.

    Raises:
        RuntimeError: If the process has an engine already.
    """
    if LMCacheEngineBuilder.get(ENGINE_NAME) is not None:
        raise RuntimeError(
            "this process has an LMCache engine already; shut the earlier vLLM engine "
            "down first"
        )
    factory = VllmServiceFactory(config, vllm_config, "worker")
    metadata = factory.get_or_create_metadata()
    assert metadata is not None
    paged_kv = RBLNPagedKVConnector(metadata)
    tp_group = get_tp_group()
    engine = LMCacheEngineBuilder.get_or_create(
        ENGINE_NAME,
        config,
        metadata,
        paged_kv,
        tp_group.broadcast,
        tp_group.broadcast_object,
    )
    _miss_instead_of_raise(engine)
    return paged_kv


def destroy_engine() -> None:
    """End the worker's engine, and the thread that watches its pins."""
    if LMCacheEngineBuilder.get(ENGINE_NAME) is not None:
        LMCacheEngineBuilder.destroy(ENGINE_NAME)
    PinMonitor.DestroyInstance()


def start_problems(adapter: Any) -> list[str]:
    """Return what LMCache could not start, and would go on without.

    Args:
        adapter: Does the connector's work.

    Returns:
        One sentence for each, empty if all is well.
    """
    problems = []
    if (failure := private_names.start_failure(adapter)) is not None:
        problems.append(startup_checks.exception_of(failure))
    engine = adapter.lmcache_engine
    if engine is not None and engine.storage_manager is not None:
        sizes = zip(
            engine.metadata.get_shapes(), engine.metadata.get_dtypes(), strict=True
        )
        problems += startup_checks.missing_tiers(
            engine.config,
            engine.storage_manager.storage_backends,
            sum(shape.numel() * dtype.itemsize for shape, dtype in sizes),
        )
    return problems


@contextmanager
def logged_failures() -> Iterator[list[str]]:
    """Collect why LMCache could not make its storage backends, which it only logs.

    Yields:
        One sentence for each, complete at the end.
    """
    failures: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if (text := record.getMessage()).startswith("Failed to "):
                failures.append(text)

    collect = Collect(logging.WARNING)
    loggers = [logging.getLogger(name) for name in _BACKEND_LOGGERS]
    for source in loggers:
        source.addHandler(collect)
    try:
        yield failures
    finally:
        for source in loggers:
            source.removeHandler(collect)


def _miss_instead_of_raise(engine: LMCacheEngine) -> None:
    """Turn a failed transfer into a chunk that is not stored, or a miss.

    LMCache lets a connector's error through, which ends the vLLM worker, and keeps the
    references to the memory objects.
    """
    store: Callable[..., None] = engine.store
    retrieve: Callable[..., torch.Tensor] = engine.retrieve

    def store_or_drop(*args: Any, **kwargs: Any) -> None:
        try:
            store(*args, **kwargs)
        except TransferFailedError as error:
            _release(error, unpin=False)
            logger.error("[req_id=%s] KV not stored: %s", kwargs.get("req_id"), error)

    def retrieve_or_miss(
        tokens: Any, mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        try:
            return retrieve(tokens, mask, **kwargs)
        except TransferFailedError as error:
            _release(error, unpin=engine.async_loading)
            logger.error("[req_id=%s] KV not loaded: %s", kwargs.get("req_id"), error)
            return torch.zeros(len(tokens), dtype=torch.bool)

    # On this engine only; LMCache's class stays as it is.
    engine.store = store_or_drop
    engine.retrieve = retrieve_or_miss


def _release(error: TransferFailedError, unpin: bool) -> None:
    for memory_obj in error.memory_objs:
        if unpin and memory_obj.is_pinned:
            memory_obj.unpin()
        memory_obj.ref_count_down()
