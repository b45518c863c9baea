# SPDX-License-Identifier: Apache-2.0
"""A worker of several KV cache groups beside a real server, and what it must hold."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
import itertools
import threading
import time

# Third Party
from kv_reference import Case, assert_same_bytes, unique_values, upload
import torch

# First Party
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.transfer_context import create_transfer_context
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

CHUNK = 32
NULL = 0
#: Nothing that is awaited takes longer, unless it never comes.
SOON_S = 120.0
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Group:
    """A group of layers.

    Attributes:
        case: Their sizes.
        window: Tokens of its sliding window; -1 is full attention.
    """

    case: Case
    window: int = -1

    @property
    def blocks_in_chunk(self) -> int:
        """Blocks that a chunk spans."""
        return CHUNK // self.case.block_size

    @property
    def window_chunks(self) -> int | None:
        """Chunks that a prefix needs, the last ones; None is all."""
        return None if self.window < 0 else -(-self.window // CHUNK)

    def held(self, chunk: int) -> range:
        """Positions of the request's blocks that a chunk holds."""
        end = (chunk + 1) * self.blocks_in_chunk
        tokens = self.window if 0 <= self.window < CHUNK else CHUNK
        return range(end - tokens // self.case.block_size, end)

    def passed(self, tokens: int) -> int:
        """How many blocks vLLM has freed of a request of so many tokens."""
        if self.window < 0:
            return 0
        return max(0, tokens - self.window + 1) // self.case.block_size


class HybridWorker:
    """LMCache's worker context with unique values in its KV cache.

    Args:
        port: Port of the server.
        groups: Its groups, in the order of registration.
    """

    def __init__(self, port: int, groups: Sequence[Group]) -> None:
        self.groups = list(groups)
        number = next(_numbers)
        self.model = f"model {number}"
        self.before: list[list[torch.Tensor]] = []
        self.layers: list[list[torch.Tensor]] = []
        start = 1
        for group in groups:
            shape = group.case.layer_shape
            values = []
            for _ in range(group.case.num_layers):
                values.append(unique_values(shape, start).to(group.case.dtype))
                start += values[-1].numel()
            self.before.append(values)
            self.layers.append([upload(layer, "rbln:0") for layer in values])
        self.client = RequestClientFactory.create(f"tcp://127.0.0.1:{port}")
        names = iter(range(sum(len(layers) for layers in self.layers)))
        infos = [
            EngineGroupInfo(
                index,
                tuple(next(names) for _ in layers),
                group.case.block_size,
                group.window,
            )
            for index, (group, layers) in enumerate(
                zip(groups, self.layers, strict=True)
            )
        ]
        flat = [layer for layers in self.layers for layer in layers]
        self.kv_caches = {f"layer.{i}": layer for i, layer in enumerate(flat)}
        self.context: Any = create_transfer_context(
            self.kv_caches, instance_id=number, req_client=self.client
        )
        block = groups[0].case.block_size
        # LMCache 0.5.6 lacks it, which mypy sees.
        more: dict[str, Any] = {"lmcache_chunk_tokens": CHUNK}
        self.context.register(
            self.kv_caches,
            self.model,
            1,
            CHUNK // block,
            SOON_S,
            engine_group_infos=infos,
            **more,
        )

    def key(self, name: str, end: int, start: int = 0, worker: int | None = 0) -> Any:
        """Name chunks ``start`` to ``end`` of the one prompt."""
        tokens = list(range(end * CHUNK))
        return IPCCacheServerKey.from_token_ids(
            self.model, 1, worker, tokens, start * CHUNK, end * CHUNK, name
        )

    def submit_store(
        self, name: str, block_ids: list[list[int]], start: int = 0
    ) -> Any:
        """Submit a store of chunks from ``start`` on."""
        return self.context.submit_store(
            name,
            self.key(name, start + self._chunks(block_ids), start),
            self.kv_caches,
            block_ids,
            self.context.create_recorded_event(),
            self.groups[0].blocks_in_chunk,
        )

    def store(self, name: str, block_ids: list[list[int]], start: int = 0) -> bool:
        """Store chunks from ``start`` on; returns whether they are."""
        return bool(self.submit_store(name, block_ids, start).result(SOON_S))

    def found(self, name: str, chunks: int) -> int:
        """Look a prefix up, which locks what is found; returns its chunks."""
        self.client.lookup(self.key(name, chunks, worker=None), 1).result(SOON_S)
        deadline = time.monotonic() + SOON_S
        while time.monotonic() < deadline:
            found = self.client.query_prefetch_status(name).result(SOON_S)
            if found is not None:
                return int(found)
            time.sleep(0.005)
        raise TimeoutError("the lookup never ended")

    def submit_retrieve(
        self, name: str, block_ids: list[list[int]], skip_tokens: int = 0
    ) -> Any:
        """Submit a restore of a prefix that was looked up."""
        return self.context.submit_retrieve(
            name,
            self.key(name, self._chunks(block_ids)),
            self.kv_caches,
            block_ids,
            self.context.create_recorded_event(),
            self.groups[0].blocks_in_chunk,
            skip_tokens,
        )

    def retrieve(
        self, name: str, block_ids: list[list[int]], skip_tokens: int = 0
    ) -> bool:
        """Restore a prefix that was looked up; returns whether it is."""
        return bool(self.submit_retrieve(name, block_ids, skip_tokens).result(SOON_S))

    def assert_restored(
        self,
        stored: list[list[int]] | None = None,
        restored: list[list[int]] | None = None,
        skip_tokens: int = 0,
    ) -> None:
        """Compare every element, by plain indexing, with what it must be.

        Args:
            stored: Blocks of each group that the prefix was stored from.
            restored: Blocks it was restored to; None if nothing may have changed.
            skip_tokens: Leading tokens that were not to be written.
        """
        for index, group in enumerate(self.groups):
            wanted = [layer.clone() for layer in self.before[index]]
            for at in self._written(group, restored[index] if restored else []):
                if at * group.case.block_size < skip_tokens:
                    continue
                assert stored is not None and restored is not None
                source, target = stored[index][at], restored[index][at]
                if target == NULL:
                    continue
                for layer, values in zip(wanted, self.before[index], strict=True):
                    if group.case.layout == "kv_first":
                        layer[:, target] = values[:, source]
                    else:
                        layer[target] = values[source]
            assert_same_bytes(self.layers[index], wanted)

    def reset(self) -> None:
        """Write the first values again."""
        for layers, before in zip(self.layers, self.before, strict=True):
            for layer, values in zip(layers, before, strict=True):
                layer.copy_(values)

    def _written(self, group: Group, block_ids: Sequence[int]) -> list[int]:
        chunks = range(len(block_ids) // group.blocks_in_chunk)
        last = group.window_chunks
        wanted = chunks if last is None else chunks[-last:]
        return [at for chunk in wanted for at in group.held(chunk)]

    def _chunks(self, block_ids: list[list[int]]) -> int:
        return len(block_ids[0]) // self.groups[0].blocks_in_chunk

    def end_stores(self) -> None:
        """Return when no thread is at a store that was submitted before."""
        executor = self.context._commit_executor
        threads = executor._max_workers
        all_free = threading.Barrier(threads)
        waiting = [executor.submit(all_free.wait, SOON_S) for _ in range(threads)]
        for each in waiting:
            each.result(SOON_S)

    def close(self) -> None:
        """Unregister, as a worker that stops does."""
        left = self.context.unregister()
        if left is not None:
            left.result(SOON_S)
        self.context.close()
        self.client.close()


def runs(groups: Sequence[Group], chunks: int, first: int = 1) -> list[list[int]]:
    """Blocks from ``first`` on for so many chunks of each group."""
    return [
        list(range(first, first + chunks * group.blocks_in_chunk)) for group in groups
    ]


def noted(client: Any, name: str) -> list[Any]:
    """Note the last argument of every call of a client's method."""
    calls: list[Any] = []
    method = getattr(client, name)

    def call(*args: Any) -> Any:
        calls.append(args[-1])
        return method(*args)

    setattr(client, name, call)
    return calls
