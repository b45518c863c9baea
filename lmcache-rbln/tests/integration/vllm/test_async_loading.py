# SPDX-License-Identifier: Apache-2.0
"""LMCache's asynchronous loading: what is loaded stays stored."""

# Standard
from types import SimpleNamespace
from typing import Any
import queue
import threading

# Third Party
from one_worker import CHUNK, PagedKV, engine_of
import pytest
import torch

# First Party
from lmcache_rbln._lmcache import in_process

pytestmark = pytest.mark.npu

LMCacheAsyncLookupClient = in_process(
    "v1.lookup_client.lmcache_async_lookup_client"
).LMCacheAsyncLookupClient
PROMPT = list(range(CHUNK))
OTHER = list(range(100, 100 + CHUNK))


class Numbers(PagedKV):
    """Stores a number in each chunk, and notes the numbers that it loads."""

    def __init__(self) -> None:
        self.loaded: list[float] = []

    def batched_from_gpu(self, objs: list[Any], *_: Any, **about: Any) -> None:
        for obj in objs:
            obj.tensor.fill_(about["fill"])

    def batched_to_gpu(self, objs: list[Any], *_: Any, **__: Any) -> None:
        self.loaded += [float(obj.tensor.flatten()[0]) for obj in objs]


def test_a_chunk_is_loaded_again_and_again() -> None:
    """LMCache 0.5.6 released it twice; then its memory was another chunk's."""
    device = Numbers()
    answers: queue.SimpleQueue[int] = queue.SimpleQueue()
    server = SimpleNamespace(
        send_response_to_scheduler=lambda _, tokens: answers.put(tokens),
        close=lambda: None,
    )
    with engine_of(device, lookup_server=server, enable_async_loading=True) as engine:
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
