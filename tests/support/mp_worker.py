# SPDX-License-Identifier: Apache-2.0
"""A worker of LMCache's server, run as a process of its own, with no engine around it.

``python mp_worker.py PORT STEPS`` does what ``STEPS`` says, a JSON list of
``[METHOD, ARGUMENT, ...]`` of :class:`Worker`, and prints what each returned as one
JSON list, behind ``[RESULTS]``. All workers have the same KV in the same blocks.
"""

# Future
from __future__ import annotations

# Standard
from pathlib import Path
from typing import Any
from unittest import mock
import json
import os
import pickle
import signal
import sys
import threading
import time

# Third Party
from lmcache_release import as_handed_over
import torch
import zmq

# First Party
from lmcache.integration.vllm.vllm_multi_process_adapter import (
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
    ParallelStrategy,
)
from lmcache.v1.multiprocess.transfer_context import worker_transfer
from lmcache.v1.platform.devices.rbln import transfer_context

LAYERS = 2
BLOCK = 8
CHUNK = 2 * BLOCK
SHAPE = (12, 2, 2, 1, BLOCK, 16)
TOKENS = list(range(100, 100 + 2 * CHUNK))
FROM, TO = [7, 0, 3, 8], [1, 10, 5, 2]
TIMEOUT_S = 120.0
#: None comes by itself, see ``heartbeat``.
HEARTBEAT_S = 3600.0


class Worker:
    """LMCache's worker adapter over a small KV cache.

    A request is named, and may have a cache salt.
    """

    def __init__(self, port: int) -> None:
        torch.manual_seed(0)
        self.host = [
            torch.randint(0, 1000, SHAPE, dtype=torch.int16).view(torch.bfloat16)
            for _ in range(LAYERS)
        ]
        caches = {f"layer.{i}": host.to("rbln:0") for i, host in enumerate(self.host)}
        self.layers = list(caches.values())
        alone = ParallelStrategy(
            mla_only=False,
            vllm_world_size=1,
            vllm_worker_id=0,
            tp_size=1,
            pp_size=1,
            n_servers=1,
        )
        self.adapter = LMCacheMPWorkerAdapter(
            f"tcp://127.0.0.1:{port}",
            zmq.Context.instance(),
            "model",
            BLOCK,
            alone,
            heartbeat_interval=HEARTBEAT_S,
        )
        self.adapter.register_kv_caches(caches, layout_hints={})

    def context(self) -> str:
        """Name of LMCache's class that moves the KV."""
        return type(self.adapter.transfer_ctx).__name__

    def store(self, name: str, salt: str = "") -> Any:
        """Store the prompt; returns the future's result."""
        event = self.adapter.create_recorded_event()
        self.adapter.submit_store_request(name, self._op(FROM), event, salt)
        future = self.adapter.store_futures[name]
        # As vLLM does when it takes blocks away from a request.
        self.adapter.handle_preemptions(True)
        result = future.result(timeout=TIMEOUT_S)
        self.adapter.get_finished(set())
        return result

    def found(self, name: str, salt: str = "") -> int:
        """Look the prompt up, which locks what is found; returns its chunks."""
        client = self.adapter.req_client
        key = self._key(name, salt).no_worker_id_version()
        client.lookup(key, 1).result(TIMEOUT_S)
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            chunks = client.query_prefetch_status(name).result(TIMEOUT_S)
            if chunks is not None:
                return int(chunks)
            time.sleep(0.05)
        raise TimeoutError("the lookup never ended")

    def retrieve(self, name: str, salt: str = "") -> dict[str, Any]:
        """Restore the prompt into other blocks; returns what vLLM is told."""
        event = self.adapter.create_recorded_event()
        self.adapter.submit_retrieve_request(name, self._op(TO), event, salt)
        return self._loaded(name)

    def retrieve_together(self, *names: str) -> dict[str, Any]:
        """Restore the prompt for several requests: all have it before any writes."""
        scatter = transfer_context.scatter_cpu_to_paged_kv
        all_have_it = threading.Barrier(len(names), timeout=TIMEOUT_S)

        def together(*args: Any, **kwargs: Any) -> None:
            all_have_it.wait()
            scatter(*args, **kwargs)

        with mock.patch.object(transfer_context, "scatter_cpu_to_paged_kv", together):
            for name in names:
                event = self.adapter.create_recorded_event()
                self.adapter.submit_retrieve_request(name, self._op(TO), event)
            return self._loaded(*names)

    def _loaded(self, *names: str) -> dict[str, Any]:
        for name in names:
            future, _ = self.adapter.retrieve_futures[name]
            future.wait(TIMEOUT_S)
        _, finished = self.adapter.get_finished(set())
        return {
            "finished": sorted(finished or ()),
            "failed": sorted(self.adapter.get_block_ids_with_load_errors()),
        }

    def is_exact(self) -> bool:
        """Compare the restored blocks with those stored, and all others with before."""
        wanted = [layer.clone() for layer in self.host]
        for layer in wanted:
            layer[TO] = layer[FROM].clone()
        return all(
            torch.equal(layer.cpu().view(torch.int16), host.view(torch.int16))
            for layer, host in zip(self.layers, wanted, strict=True)
        )

    def prepare_only(self, name: str) -> int:
        """Reserve slots for another prompt and never fill them; returns how many."""
        prepared = self.adapter.req_client.prepare_store(
            self._key(name, tokens=TOKENS[::-1]), self.adapter.instance_id
        ).result(60)
        return len(prepared.context.get("slots", []))

    def commit_what_makes(self, path: str) -> None:
        """Send in place of chunks what makes a file where it is unpickled."""
        chunks = pickle.dumps([_Makes(path)])
        key, number = self._key("hostile"), self.adapter.instance_id
        self.adapter.req_client.commit_store(key, number, chunks)

    def forgotten(self) -> None:
        """Let the server forget the worker, as a new one does not know it."""
        self.adapter.req_client.unregister_kv_cache_engine_driven_context(
            self.adapter.instance_id
        ).result(TIMEOUT_S)

    def store_without_an_answer(self, name: str) -> bool:
        """Submit a store; returns whether it has ended."""
        event = self.adapter.create_recorded_event()
        self.adapter.submit_store_request(name, self._op(FROM), event)
        return bool(self.adapter.store_futures[name].query())

    def heartbeat(self, name: str) -> list[Any]:
        """Have a heartbeat; returns a store's result, and what vLLM is told of it."""
        heartbeat = self.adapter._heartbeat
        assert heartbeat is not None
        heartbeat._execute()
        result = self.adapter.store_futures[name].result(TIMEOUT_S)
        finished, _ = self.adapter.get_finished({name})
        return [result, sorted(finished or ())]

    def without(self, pid: str) -> None:
        """Kill the server."""
        os.kill(int(pid), signal.SIGKILL)

    def lost(self, pid: str) -> list[Any]:
        """Kill the server while it is asked; returns how a store and a lookup end."""
        os.kill(int(pid), signal.SIGSTOP)
        event = self.adapter.create_recorded_event()
        self.adapter.submit_store_request("a", self._op(FROM), event)
        key = self._key("b").no_worker_id_version()
        lookup = self.adapter.req_client.lookup(key, 1)
        os.kill(int(pid), signal.SIGKILL)
        lookup.wait(TIMEOUT_S)
        return [
            self.adapter.store_futures["a"].result(TIMEOUT_S),
            type(lookup.exception_).__name__,
        ]

    def _op(self, block_ids: list[int]) -> LoadStoreOp:
        return LoadStoreOp(as_handed_over(TOKENS), [block_ids], 0, len(TOKENS))

    def _key(self, name: str, salt: str = "", tokens: list[int] = TOKENS) -> Any:
        return self.adapter._create_key(
            as_handed_over(tokens), 0, len(tokens), request_id=name, cache_salt=salt
        )


class _Makes:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self._path),)


def synchronous() -> None:
    """Choose LMCache's synchronous stores, as for a device without streams."""
    worker_transfer._supports_async_primitives = lambda: False


def main() -> None:
    """Run every step; whatever raises is an error of the process."""
    port, steps = int(sys.argv[1]), json.loads(sys.argv[2])
    if steps[0] == ["synchronous"]:
        synchronous()
        del steps[0]
    worker = Worker(port)
    returned = [getattr(worker, name)(*given) for name, *given in steps]
    print(f"[RESULTS]{json.dumps(returned)}", flush=True)
    # What vLLM does when it stops.
    worker.adapter.shutdown()


if __name__ == "__main__":
    main()
