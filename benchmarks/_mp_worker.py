# SPDX-License-Identifier: Apache-2.0
"""An engine's worker without the engine: stores and restores through a server.

Started by `mp_server`, one process per NPU. It reads commands from stdin and answers
each with one line that begins with the mark.
"""

# Standard
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
import json
import sys
import time

MARK = "@@"
MODEL_NAME = "benchmark"
_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Load:
    """What every worker stores and restores in one round.

    Attributes:
        model: Name of the model whose KV cache it is.
        block_size: Tokens per block and per chunk.
        blocks: Blocks of a request.
        requests: Requests, all of them stored at once, and then restored at once.
        port: Port of the LMCache server.
        worker: Number of the worker.
    """

    model: str
    block_size: int
    blocks: int
    requests: int
    port: int
    worker: int


class Worker:
    """The KV cache of one worker and its connection to the server."""

    def __init__(self, load: Load) -> None:
        # Third Party
        import torch

        # First Party
        from benchmarks._cases import MODELS
        from lmcache.v1.multiprocess.transfer_context.worker_transfer import (
            create_transfer_context,
        )
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self._load = load
        self._model = MODELS[load.model]
        stored = load.blocks * load.requests
        # What is restored goes to other blocks, so that it can be compared.
        shape = (
            2 * stored,
            2,
            self._model.heads,
            1,
            load.block_size,
            self._model.head_size,
        )
        self._caches = {}
        for layer in range(self._model.layers):
            cache = torch.empty(shape, dtype=torch.bfloat16, device="rbln:0")
            torch.rbln.bind_device_memory(cache)  # type: ignore[attr-defined]
            random = torch.empty(shape, dtype=torch.int16).random_()
            random[stored:] = 0
            cache.copy_(random.view(torch.bfloat16))
            self._caches[f"layer.{layer}"] = cache
        self._client = RequestClientFactory.create(f"tcp://127.0.0.1:{load.port}")
        self._context = create_transfer_context(
            self._caches, instance_id=load.worker + 1, req_client=self._client
        )
        self._context.register(self._caches, MODEL_NAME, 1, 1, _TIMEOUT_S)

    def _key(self, turn: int, request: int, name: str, lookup: bool = False) -> Any:
        # First Party
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

        load = self._load
        tokens = load.blocks * load.block_size
        # No two requests share a chunk.
        first = ((turn * 64 + load.worker) * 64 + request) * tokens
        return IPCCacheServerKey.from_token_ids(
            model_name=MODEL_NAME,
            world_size=1,
            worker_id=None if lookup else 0,
            token_ids=list(range(first, first + tokens)),
            start=0,
            end=tokens,
            request_id=f"{name}-{turn}-{load.worker}-{request}",
            num_kv_readers=1,
        )

    def _blocks(self, request: int, restored: bool) -> list[int]:
        load = self._load
        first = request * load.blocks + restored * load.blocks * load.requests
        return list(range(first, first + load.blocks))

    def store(self, turn: int) -> dict[str, Any]:
        """Store all requests at once.

        Returns:
            When it began and ended, and each submission's time on this thread.
        """
        keys = [self._key(turn, r, "store") for r in range(self._load.requests)]
        return self._transfer(self._context.submit_store, keys, restored=False)

    def restore(self, turn: int) -> dict[str, Any]:
        """Look all requests up, then restore all at once.

        Returns:
            As :meth:`store`; looking up, which is the scheduler's work, is left out.
        """
        for request in range(self._load.requests):
            self._look_up(self._key(turn, request, "restore", lookup=True))
        keys = [self._key(turn, r, "restore") for r in range(self._load.requests)]
        answer = self._transfer(self._context.submit_retrieve, keys, restored=True)
        for key in keys:
            self._client.end_session(key.request_id).result(timeout=_TIMEOUT_S)
        return answer

    def _transfer(
        self, submit: Callable[..., Any], keys: list[Any], restored: bool
    ) -> dict[str, Any]:
        calls, futures = [], []
        begin = time.perf_counter()
        for request, key in enumerate(keys):
            start = time.perf_counter()
            blocks = [self._blocks(request, restored)]
            event = self._context.create_recorded_event()
            future = submit(key.request_id, key, self._caches, blocks, event, 1)
            calls.append(time.perf_counter() - start)
            futures.append(future)
        done = [future.result(timeout=_TIMEOUT_S) for future in futures]
        end = time.perf_counter()
        if not all(done):
            raise RuntimeError(
                "the server did not take or give everything; see its log"
            )
        return {"begin": begin, "end": end, "calls": calls}

    def _look_up(self, key: Any) -> None:
        self._client.lookup(key, 1).result(timeout=_TIMEOUT_S)
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            status = self._client.query_prefetch_status(key.request_id)
            found = status.result(timeout=_TIMEOUT_S)
            if found is not None:
                break
            if time.monotonic() > deadline:
                raise RuntimeError("the server did not end a lookup")
            time.sleep(0.001)
        if found != self._load.blocks:
            raise RuntimeError(f"stored {self._load.blocks} chunks, found {found}")

    def verify(self, _turn: int) -> dict[str, Any]:
        """Compare what was restored with what was stored, byte by byte.

        Raises:
            RuntimeError: They differ.
        """
        # Third Party
        import torch

        stored = self._load.blocks * self._load.requests
        for name, cache in self._caches.items():
            bits = cache.cpu().view(torch.int16)
            if not torch.equal(bits[:stored], bits[stored:]):
                raise RuntimeError(f"{name} was not restored as it was stored")
        return {}

    def close(self) -> None:
        """Take leave of the server."""
        future = self._context.unregister()
        if future is not None:
            future.result(timeout=_TIMEOUT_S)
        self._context.close()
        self._client.close()


def main(text: str) -> None:
    """Serve commands: ``store TURN``, ``restore TURN``, ``verify TURN``, ``quit``."""
    worker = Worker(Load(**json.loads(text)))
    print(MARK + "{}", flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "quit":
            break
        answer = getattr(worker, command)(int(arguments[0]))
        print(MARK + json.dumps(answer), flush=True)
    worker.close()


if __name__ == "__main__":
    main(sys.argv[1])
