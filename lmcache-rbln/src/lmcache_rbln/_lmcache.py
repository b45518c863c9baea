# SPDX-License-Identifier: Apache-2.0
"""LMCache's in-process engine, wherever the installed release has it.

LMCache 0.5.7 moved it from ``lmcache`` to ``lmcache.inprocess``. What is used of it is
imported from here, and only when it is used: parts of it need vLLM.
"""

# Future
from __future__ import annotations

# Standard
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # First Party
    from lmcache.integration.vllm.lmcache_connector_v1 import (
        LMCacheConnectorV1Dynamic as LMCacheConnectorV1Dynamic,
    )
    from lmcache.integration.vllm.vllm_service_factory import (
        VllmServiceFactory as VllmServiceFactory,
    )
    from lmcache.integration.vllm.vllm_v1_adapter import (
        LMCacheConnectorMetadata as LMCacheConnectorMetadata,
    )
    from lmcache.integration.vllm.vllm_v1_adapter import ReqMeta as ReqMeta
    from lmcache.v1.cache_engine import LMCacheEngine as LMCacheEngine
    from lmcache.v1.cache_engine import LMCacheEngineBuilder as LMCacheEngineBuilder
    from lmcache.v1.gpu_connector.gpu_connectors import (
        GPUConnectorInterface as GPUConnectorInterface,
    )
    from lmcache.v1.pin_monitor import PinMonitor as PinMonitor
    from lmcache.v1.rpc_utils import ServiceKind as ServiceKind
    from lmcache.v1.rpc_utils import (
        get_zmq_rpc_path_lmcache as get_zmq_rpc_path_lmcache,
    )

_PACKAGE = "lmcache.inprocess" if find_spec("lmcache.inprocess") else "lmcache"
_MODULES = {
    "GPUConnectorInterface": "v1.gpu_connector.gpu_connectors",
    "LMCacheConnectorMetadata": "integration.vllm.vllm_v1_adapter",
    "LMCacheConnectorV1Dynamic": "integration.vllm.lmcache_connector_v1",
    "LMCacheEngine": "v1.cache_engine",
    "LMCacheEngineBuilder": "v1.cache_engine",
    "PinMonitor": "v1.pin_monitor",
    "ReqMeta": "integration.vllm.vllm_v1_adapter",
    "ServiceKind": "v1.rpc_utils",
    "VllmServiceFactory": "integration.vllm.vllm_service_factory",
    "get_zmq_rpc_path_lmcache": "v1.rpc_utils",
}


def in_process(module: str) -> ModuleType:
    """Import a module of the in-process engine.

    Args:
        module: Its name in LMCache 0.5.6 behind ``lmcache.``, such as
            ``v1.cache_engine``.
    """
    return import_module(f"{_PACKAGE}.{module}")


def __getattr__(name: str) -> Any:
    """Return one of the classes named above."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(in_process(_MODULES[name]), name)
