# SPDX-License-Identifier: Apache-2.0
"""LMCache's worker adapter over an RBLN cache, and a server that a test plays."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
import os
import threading

# Third Party
from kv_reference import (
    LAYOUTS,
    Case,
    Layout,
    assert_same_bytes,
    move,
    random_bits,
    unique_values,
    upload,
)
from lmcache_release import received, sent
import torch

# First Party
from lmcache.integration.vllm import vllm_multi_process_adapter as adapters
from lmcache.v1.multiprocess.custom_types import (
    PrepareRetrieveResponse,
    PrepareStoreResponse,
    RegisterEngineDrivenContextResponse,
)
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transfer_context.shm import ABORT_STORE, ShmSlotDescriptor
from lmcache.v1.platform.devices.rbln import transfer_context

BLOCK, CHUNK = 16, 32
TO = [7, 0, 3, 8]
#: Nothing that is awaited takes longer, unless it never comes.
SOON_S = 120.0
#: Arguments of :class:`Worker`: each layout over both transports.
WORKERS = [(layout, shm) for layout in LAYOUTS for shm in (True, False)]


def name_of(worker: tuple[Layout, bool]) -> str:
    """Name one of ``WORKERS`` in the name of a test."""
    layout, shm = worker
    return f"{layout}-{'SHM' if shm else 'pickle'}"


def answered(value: Any) -> MessagingFuture[Any]:
    future: MessagingFuture[Any] = MessagingFuture()
    future.set_result(value)
    return future


class Server:
    """What the worker asks a server, and two chunks that it has of every prompt.

    Args:
        case: The KV cache.
        shm: Whether chunks are in shared memory, else sent in messages.
    """

    def __init__(self, case: Case, shm: bool) -> None:
        shape = case.chunk_shape(CHUNK)
        self.chunks = [random_bits(shape, case.dtype, 70 + i) for i in range(2)]
        self.calls: list[str] = []
        self.answers = True
        self.waiting: list[MessagingFuture[Any]] = []
        self.asked = threading.Semaphore(0)
        self._size = self.chunks[0].nbytes
        # Not through Python, which would want to remove what LMCache takes over.
        name = f"rbln_restores_{os.getpid()}_{id(self)}" if shm else ""
        self._segment = Path("/dev/shm", name) if shm else None
        if self._segment is not None:
            parts = [chunk.view(torch.uint8).numpy().tobytes() for chunk in self.chunks]
            self._segment.write_bytes(b"".join(parts))
        self.client = mock.MagicMock()
        self.client.get_chunk_size.side_effect = lambda: answered(CHUNK)
        self.client.get_experimental.side_effect = lambda: answered([])
        registered = RegisterEngineDrivenContextResponse(
            shm_name=name, pool_size=2 * self._size if shm else 0
        )
        for name, answer in {
            "register_kv_cache_engine_driven_context": registered,
            "unregister_kv_cache_engine_driven_context": None,
            "commit_retrieve": True,
        }.items():
            getattr(self.client, name).side_effect = self._noted(name, answer)
        self.client.prepare_retrieve.side_effect = lambda *_: self._prepare(
            "prepare_retrieve", self.response
        )
        self.client.prepare_store.side_effect = lambda *_: self._prepare(
            "prepare_store", self.slots
        )
        #: What COMMIT_STORE came with.
        self.commits: list[bytes] = []
        self.client.commit_store.side_effect = self._commit_store

    def response(self) -> PrepareRetrieveResponse:
        """The chunks, as a server hands them over."""
        if self._segment is None:
            return PrepareRetrieveResponse(True, sent(self.chunks))
        slots = [
            ShmSlotDescriptor(
                index * self._size,
                self._size,
                list(chunk.shape),
                str(chunk.dtype).removeprefix("torch."),
            ).to_dict()
            for index, chunk in enumerate(self.chunks)
        ]
        return PrepareRetrieveResponse(True, context={"slots": slots})

    def slots(self) -> PrepareStoreResponse:
        """Slots for both chunks, those that hold the chunks."""
        context = self.response().context
        return PrepareStoreResponse({**context, "chunk_indices": [0, 1]})

    def stored(self) -> list[torch.Tensor]:
        """What is in the slots, or came with the last commit."""
        if self._segment is None:
            return received(self.commits[-1], self.chunks[0], len(self.chunks))
        raw, size = bytearray(self._segment.read_bytes()), self._size
        return [
            torch.frombuffer(raw[i * size : (i + 1) * size], dtype=chunk.dtype).view(
                chunk.shape
            )
            for i, chunk in enumerate(self.chunks)
        ]

    def close(self) -> None:
        """Remove the segment."""
        if self._segment is not None:
            self._segment.unlink()

    def _noted(self, name: str, answer: Any) -> Any:
        def call(*_: Any) -> MessagingFuture[Any]:
            self.calls.append(name)
            return answered(answer)

        return call

    def _commit_store(self, _key: Any, _instance: int, data: bytes) -> Any:
        self.commits.append(data)
        return answered(data != ABORT_STORE)

    def _prepare(self, name: str, answer: Callable[[], Any]) -> MessagingFuture[Any]:
        self.calls.append(name)
        future: MessagingFuture[Any] = MessagingFuture()
        if self.answers:
            future.set_result(answer())
        else:
            self.waiting.append(future)
        self.asked.release()
        return future


class Gate:
    """Holds copies up, right before they begin: a scatter, or what is named."""

    def __init__(
        self,
        monkeypatch: Any,
        module: Any = transfer_context,
        name: str = "scatter_cpu_to_paged_kv",
    ) -> None:
        self.reached, self._open = threading.Semaphore(0), threading.Event()
        copies = getattr(module, name)

        def held(*args: Any, **kwargs: Any) -> Any:
            self.reached.release()
            assert self._open.wait(SOON_S)
            return copies(*args, **kwargs)

        monkeypatch.setattr(module, name, held)

    def await_writer(self) -> None:
        """Return when copies are held."""
        assert self.reached.acquire(timeout=SOON_S)

    def open(self) -> None:
        """Let all go on."""
        self._open.set()


class Worker:
    """LMCache's worker adapter, in the state in which vLLM uses it."""

    def __init__(self, layout: Layout, shm: bool) -> None:
        self.shm = shm
        self.case = Case(layout, 3, 9, block_size=BLOCK)
        shape = self.case.layer_shape
        count = torch.Size(shape).numel()
        self.before = [
            unique_values(shape, 1 + i * count).to(self.case.dtype) for i in range(3)
        ]
        self.layers = [upload(layer, "rbln:0") for layer in self.before]
        self.server = Server(self.case, shm)
        alone = adapters.ParallelStrategy(False, 1, 0, 1, 1, 1)
        with mock.patch.object(
            adapters.RequestClientFactory, "create", return_value=self.server.client
        ):
            self.adapter = adapters.LMCacheMPWorkerAdapter(
                "tcp://a-server",
                mock.MagicMock(),
                "model",
                BLOCK,
                alone,
                mq_timeout=SOON_S,
            )
        # No heartbeats: the test says whether the server is there.
        heartbeat: Any = SimpleNamespace(stop=int, stop_requested=False)
        self.adapter._heartbeat = heartbeat
        caches = {f"layer.{i}": layer for i, layer in enumerate(self.layers)}
        self.adapter.register_kv_caches(caches, layout_hints={})

    def submit(self, name: str, block_ids: list[int] = TO) -> MessagingFuture[Any]:
        """Submit the load of a request, as vLLM's worker does."""
        op = adapters.LoadStoreOp(list(range(2 * CHUNK)), [block_ids], 0, 2 * CHUNK)
        event = self.adapter.create_recorded_event()
        self.adapter.submit_retrieve_request(name, op, event)
        return self.adapter.retrieve_futures[name][0]

    def store(self, name: str, block_ids: list[int] = TO) -> MessagingFuture[Any]:
        """Submit the store of a request, as vLLM's worker does."""
        op = adapters.LoadStoreOp(list(range(2 * CHUNK)), [block_ids], 0, 2 * CHUNK)
        event = self.adapter.create_recorded_event()
        self.adapter.submit_store_request(name, op, event)
        return self.adapter.store_futures[name]

    def reports(self, *ended: str) -> tuple[set[str], set[str], set[int]]:
        """What vLLM is told: stored and loaded requests, and blocks of failed loads."""
        stored, loaded = self.adapter.get_finished(set(ended))
        failed = self.adapter.get_block_ids_with_load_errors()
        return stored or set(), loaded or set(), failed

    def assert_restored(self, *places: Sequence[int]) -> None:
        """Compare every block with what it must hold, byte by byte."""
        wanted = [layer.clone() for layer in self.before]
        for block_ids in places:
            move(self.case, False, wanted, self.server.chunks, list(block_ids), CHUNK)
        assert_same_bytes(self.layers, wanted)

    def close(self) -> None:
        """Stop as vLLM stops it."""
        self.adapter.shutdown()
        self.server.close()
