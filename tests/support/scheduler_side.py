# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of the in-process connector without an engine."""

# Standard
from types import SimpleNamespace
from typing import Any


class Lookup:
    """A lookup client that finds what it is told to."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self.hit = 0
        self.asked: list[tuple[str, Any]] = []

    def lookup_cache(self, lookup_id: str) -> int:
        return -1

    def lookup(self, token_ids: Any, lookup_id: str, request_configs: Any) -> int:
        self.asked.append((lookup_id, request_configs))
        return min(self.hit, len(token_ids)) // self.chunk_size * self.chunk_size

    def clear_lookup_status(self, lookup_id: str) -> None:
        pass


def scheduler_side(lookup: Any, block_size: int, chunk_size: int) -> Any:
    """Our connector's scheduler side over LMCache's own.

    Args:
        lookup: Its lookup client.
        block_size: Tokens per block.
        chunk_size: Tokens per chunk.
    """
    # First Party
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache_rbln._lmcache import in_process
    from lmcache_rbln.integration.vllm.connector import RBLNLMCacheConnectorV1
    from lmcache_rbln.settings import Settings

    connector = RBLNLMCacheConnectorV1.__new__(RBLNLMCacheConnectorV1)
    impl = in_process("integration.vllm.vllm_v1_adapter").LMCacheConnectorV1Impl
    inner: Any = impl.__new__(impl)
    vars(inner).update(
        _manager=SimpleNamespace(lookup_client=lookup, lmcache_engine=None),
        config=LMCacheEngineConfig.from_defaults(chunk_size=chunk_size),
        kv_role="kv_both",
        load_specs={},
        async_loading=False,
        force_skip_save=False,
        skip_last_n_tokens=0,
        _requests_priority={},
        _unfinished_requests={},
        _request_trackers={},
        _block_size=block_size,
        _lmcache_chunk_size=chunk_size,
        _discard_partial_chunks=True,
        _max_tokens_per_load=0,
    )
    transfer_config = SimpleNamespace(kv_load_failure_policy="recompute")
    vars(connector).update(
        _vllm_config=SimpleNamespace(
            kv_transfer_config=transfer_config,
            cache_config=SimpleNamespace(block_size=block_size),
        ),
        _lmcache_engine=inner,
        _settings=Settings(),
    )
    connector.begin_requests()
    return connector
