# SPDX-License-Identifier: Apache-2.0
"""LMCache's asynchronous loading: what is loaded stays stored."""

# Future
from __future__ import annotations

# Standard
from types import SimpleNamespace
from typing import Any
import queue
import threading
import uuid

# Third Party
import pytest
import torch

# First Party
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache_rbln._lmcache import LMCacheEngineBuilder, in_process

pytestmark = pytest.mark.npu

LMCacheAsyncLookupClient = in_process(
    "v1.lookup_client.lmcache_async_lookup_client"
).LMCacheAsyncLookupClient
CHUNK = 16
PROMPT = list(range(CHUNK))
OTHER = list(range(100, 100 + CHUNK))


class PagedKV:
    """Stores a number in each chunk, and notes the numbers that it loads."""

    def __init__(self) -> None:
        self.loaded: list[float] = []

    def batched_from_gpu(
        self, objs: list[Any], *_: Any, fill: float, **__: Any
    ) -> None:
        for obj in objs:
            obj.tensor.fill_(fill)

    def batched_to_gpu(self, objs: list[Any], *_: Any, **__: Any) -> None:
        self.loaded += [float(obj.tensor.flatten()[0]) for obj in objs]

    def initialize_kvcaches_ptr(self, **_: Any) -> None:
        pass


def test_a_chunk_is_loaded_again_and_again() -> None:
    """LMCache 0.5.6 released it twice; then its memory was another chunk's."""
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK,
        max_local_cpu_size=0.01,
        enable_async_loading=True,
        pre_caching_hash_algorithm="sha256_cbor",
    )
    metadata = LMCacheMetadata(
        model_name="m",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.float32,
        kv_shape=(1, 1, CHUNK, 1, 1),
        role="worker",
        chunk_size=CHUNK,
    )
    device: Any = PagedKV()
    name = uuid.uuid4().hex
    engine = LMCacheEngineBuilder.get_or_create(
        name,
        config,
        metadata,
        device,
        lambda tensor, source: None,
        lambda value, source: value,
    )
    answers: queue.SimpleQueue[int] = queue.SimpleQueue()
    server: Any = SimpleNamespace(
        send_response_to_scheduler=lambda _, tokens: answers.put(tokens),
        close=lambda: None,
    )
    engine.post_init(async_lookup_server=server)
    try:
        engine.store(PROMPT, fill=1.0, req_id="stored")
        for turn in range(3):
            request = f"request {turn}"
            engine.async_lookup_and_prefetch(lookup_id=request, tokens=PROMPT, pin=True)
            assert answers.get(timeout=300) == CHUNK
            mask = torch.ones(CHUNK, dtype=torch.bool)
            assert int(engine.retrieve(PROMPT, mask, req_id=request).sum()) == CHUNK
            # As behind every step.
            engine.lookup_unpin(request)
            engine.store(OTHER, fill=2.0, req_id=f"other {turn}")
        assert device.loaded == [1.0] * 3
    finally:
        LMCacheEngineBuilder.destroy(name)


def test_an_aborted_request_is_remembered_until_its_lookup_has_ended() -> None:
    """LMCache 0.5.6 kept all whose lookup had ended before, for ever."""
    client = LMCacheAsyncLookupClient.__new__(LMCacheAsyncLookupClient)
    sent: list[bytes] = []
    socket = SimpleNamespace(send=lambda message, copy: sent.append(message))
    vars(client).update(
        reqs_status={"looking": None},
        aborted_lookups=set(),
        first_lookup_time={},
        lock=threading.Lock(),
        push_sockets=[socket],
        world_size=1,
    )
    for request in ("looking", "looked up before", "never looked up"):
        client.cancel_lookup(request)
    client._cleanup_finished_aborted_lookups()
    assert client.aborted_lookups == {"looking"} and not sent
    client.reqs_status["looking"] = CHUNK
    client._cleanup_finished_aborted_lookups()
    assert not client.aborted_lookups and not client.reqs_status
    [message] = sent
    assert b"looking" in message
