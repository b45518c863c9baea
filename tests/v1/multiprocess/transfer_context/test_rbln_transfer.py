# SPDX-License-Identifier: Apache-2.0
"""LMCache's worker path over RBLN caches: detection, gather, scatter, contexts."""

# Standard
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock
import threading

# Third Party
from kv_reference import (
    LAYOUTS,
    Case,
    Layout,
    assert_same_bytes,
    move,
    random_bits,
    upload,
)
import pytest
import torch

# First Party
from lmcache.v1.multiprocess.custom_types import RegisterEngineDrivenContextResponse
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transfer_context import worker_transfer
from lmcache.v1.multiprocess.transfer_context.base import (
    compute_kv_layout,
    gather_paged_kv_to_cpu,
    scatter_cpu_to_paged_kv,
)

pytestmark = [pytest.mark.npu, pytest.mark.deferred]


class Cache:
    """One KV cache on the device and its twin in host memory."""

    def __init__(self, layout: Layout, **sizes: Any) -> None:
        self.case = Case(layout, 3, **({"num_blocks": 9, "block_size": 16} | sizes))
        self.host = [
            random_bits(self.case.layer_shape, self.case.dtype, i) for i in range(3)
        ]
        self.device = {
            f"layer.{i}": upload(t, "rbln:0") for i, t in enumerate(self.host)
        }

    def chunks(self, count: int, tokens: int, seed: int = 70) -> list[torch.Tensor]:
        shape = self.case.chunk_shape(tokens)
        return [random_bits(shape, self.case.dtype, seed + i) for i in range(count)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_as_registered_with_the_server(layout: Layout) -> None:
    cache = Cache(layout, num_heads=3, head_size=8)
    block, layers, hidden, dtype, found, planes = compute_kv_layout(cache.device)
    assert (block, layers, dtype) == (16, 3, "bfloat16")
    assert hidden == 8 * cache.case.heads
    assert (found, planes) == (cache.case.engine_kv_format, cache.case.planes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 4])
def test_gather(layout: Layout, blocks_per_chunk: int) -> None:
    cache = Cache(layout)
    block_ids = [7, 0, 3, 8, 2, 5, 4, 1]
    tokens = 16 * blocks_per_chunk
    wanted = cache.chunks(len(block_ids) // blocks_per_chunk, tokens)
    move(cache.case, True, cache.host, wanted, block_ids, tokens)
    got = gather_paged_kv_to_cpu(cache.device, block_ids, blocks_per_chunk)
    assert_same_bytes(got, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_of_the_chunks_that_the_server_lacks(layout: Layout) -> None:
    cache = Cache(layout)
    block_ids = [7, 0, 3, 8, 2, 5, 4, 1]
    wanted = cache.chunks(4, 32)
    move(cache.case, True, cache.host, wanted, block_ids, 32)
    slots = cache.chunks(3, 32, seed=90)
    untouched = slots[2].clone()
    got = gather_paged_kv_to_cpu(
        cache.device, block_ids, 2, out=slots, chunk_indices=[1, 3]
    )
    assert_same_bytes(got, [wanted[1], wanted[3]])
    assert got[0].data_ptr() == slots[0].data_ptr()
    assert_same_bytes(slots[2:], [untouched])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("skipped_tokens", [0, 16, 31, 48, 64, 96])
def test_scatter(layout: Layout, skipped_tokens: int) -> None:
    cache = Cache(layout)
    chunks = cache.chunks(3, 32)
    block_ids = [7, 0, 3, 8, 2, 5]
    move(cache.case, False, cache.host, chunks, block_ids, 32, skipped_tokens // 16)
    scatter_cpu_to_paged_kv(
        cache.device, block_ids, chunks, 2, skip_first_n_tokens=skipped_tokens
    )
    assert_same_bytes(list(cache.device.values()), cache.host)


def test_streams_events_and_pinned_memory_mean_asynchronous_stores() -> None:
    assert worker_transfer._supports_async_primitives()


@pytest.mark.parametrize("mode", ["auto", "engine_driven", None])
def test_transfers_are_engine_driven(
    mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LMCACHE_MP_TRANSFER_MODE", raising=False)
    context = worker_transfer.create_transfer_context(
        Cache("blocks_first").device,
        instance_id=1,
        req_client=MagicMock(),
        mode=mode,
    )
    assert isinstance(context, worker_transfer.EngineDrivenTransferContext)
    context.close()


@pytest.mark.parametrize("by_argument", [True, False])
def test_lmcache_driven_transfers_are_refused(
    by_argument: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "LMCACHE_MP_TRANSFER_MODE", "auto" if by_argument else "lmcache_driven"
    )
    refusal = "MP transfer mode 'lmcache_driven' is not supported"
    with pytest.raises(ValueError, match=refusal):
        worker_transfer.create_transfer_context(
            Cache("blocks_first").device,
            instance_id=1,
            req_client=MagicMock(),
            mode="lmcache_driven" if by_argument else None,
        )


def answered(value: Any) -> MessagingFuture[Any]:
    future: MessagingFuture[Any] = MessagingFuture()
    future.set_result(value)
    return future


def register(client: Any, timeout: float = 60.0) -> Any:
    """A context that is registered with a server that answers through ``client``."""
    caches = Cache("blocks_first").device
    context = worker_transfer.create_transfer_context(
        caches, instance_id=1, req_client=client, mode="engine_driven"
    )
    context.register(caches, "model", 1, 1, timeout)
    return context


def test_a_registration_that_a_server_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_transfer, "_REGISTRATION_GRACE", 0.01)
    client = MagicMock()
    client.register_kv_cache_engine_driven_context.return_value = MessagingFuture()
    client.get_chunk_size.return_value = answered(16)
    with pytest.raises(RuntimeError, match="--supported-transfer-mode engine_driven"):
        register(client)


def test_a_server_that_answers_nothing_is_not_blamed_for_its_mode() -> None:
    client = MagicMock()
    client.register_kv_cache_engine_driven_context.return_value = MessagingFuture()
    client.get_chunk_size.return_value = MessagingFuture()
    with pytest.raises(TimeoutError):
        register(client, timeout=0.01)


def test_a_worker_unregisters_when_its_stores_have_ended() -> None:
    """The server refuses their commits afterwards, and does not answer them."""
    client = MagicMock()
    client.get_chunk_size.return_value = answered(16)
    client.register_kv_cache_engine_driven_context.return_value = answered(
        RegisterEngineDrivenContextResponse(shm_name="", pool_size=0)
    )
    prepared: MessagingFuture[Any] = MessagingFuture()
    client.prepare_store.return_value = prepared
    client.commit_store.return_value = answered(True)
    context = register(client)
    key = SimpleNamespace(request_id="a request")
    stored = context.submit_store(
        "a request",
        key,
        Cache("blocks_first").device,
        [[1]],
        context.create_recorded_event(),
        1,
    )
    stops = threading.Thread(target=context.unregister)
    stops.start()
    client.unregister_kv_cache_engine_driven_context.assert_not_called()
    prepared.set_result(SimpleNamespace(context={}))
    stops.join(60.0)
    assert stored.result(60.0) is True
    calls = [name for name, *_ in client.method_calls]
    assert calls[-2:] == ["commit_store", "unregister_kv_cache_engine_driven_context"]
    context.close()


def test_waiting_for_stores_at_a_preemption_raises_nothing() -> None:
    client = MagicMock()
    client.get_chunk_size.return_value = answered(16)
    client.register_kv_cache_engine_driven_context.return_value = answered(
        RegisterEngineDrivenContextResponse(shm_name="", pool_size=0)
    )
    context = register(client)
    failed = MagicMock()
    failed.synchronize.side_effect = RuntimeError("an old failure of the NPU")
    context._inflight_gather_events.add(failed)
    context.flush_inflight_stores()
    failed.synchronize.assert_called_once()
    context._inflight_gather_events.clear()
    context.close()
