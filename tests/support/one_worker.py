# SPDX-License-Identifier: Apache-2.0
"""LMCache's engine of one worker, on the host, over a device of a test's own."""

# Standard
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
import uuid

# Third Party
import torch

# First Party
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache_rbln._lmcache import LMCacheEngine, LMCacheEngineBuilder

#: Tokens of a chunk.
CHUNK = 16


class PagedKV:
    """A paged KV cache that LMCache stores from and loads to; nothing of it is kept."""

    def batched_from_gpu(self, objs: list[Any], *_: Any, **__: Any) -> None:
        """Fill chunks."""

    def batched_to_gpu(self, objs: list[Any], *_: Any, **__: Any) -> None:
        """Take chunks."""

    def initialize_kvcaches_ptr(self, **_: Any) -> None:
        """There is nothing to prepare."""


@contextmanager
def engine_of(
    device: Any,
    layers: int = 1,
    hidden: int = 1,
    lookup_server: Any = None,
    **settings: Any,
) -> Iterator[LMCacheEngine]:
    """Make an engine with a small CPU tier, and destroy it in the end.

    Args:
        device: Does what a connector to the paged KV cache does.
        layers: Of the model.
        hidden: Elements of a token's KV in a layer.
        lookup_server: Gets the answers of asynchronous lookups.
        settings: Of LMCache.
    """
    values: dict[str, Any] = {
        "chunk_size": CHUNK,
        "max_local_cpu_size": 0.01,
        "pre_caching_hash_algorithm": "sha256_cbor",
    }
    metadata = LMCacheMetadata(
        model_name="m",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.float32,
        kv_shape=(layers, 1, CHUNK, 1, hidden),
        role="worker",
        chunk_size=CHUNK,
    )
    name = uuid.uuid4().hex
    engine = LMCacheEngineBuilder.get_or_create(
        name,
        LMCacheEngineConfig.from_defaults(**values | settings),
        metadata,
        device,
        lambda tensor, source: None,
        lambda value, source: value,
    )
    try:
        engine.post_init(async_lookup_server=lookup_server)
        yield engine
    finally:
        LMCacheEngineBuilder.destroy(name)
