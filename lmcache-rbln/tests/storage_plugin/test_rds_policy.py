# SPDX-License-Identifier: Apache-2.0
"""What stays when space is short: the beginning of prompts, by a model and by cases."""

# Standard
from collections.abc import Iterable, Sequence
from typing import Any
import logging
import random

# Third Party
from rds_policy import Path, PolicyModel, prompt_of
from rds_support import Engine, MakeEngine, key_of, metadata_of
import pytest

# First Party
from lmcache.utils import CacheEngineKey
from lmcache_rbln.storage_plugin.rds.chunk_io import ChunkIO
from lmcache_rbln.storage_plugin.rds.device import RDSError

pytestmark = pytest.mark.npu

# One element a plane, layer and token: a chunk is its header and one sector.
TINY = {"kv_shape": (1, 2, 16, 1, 16), "chunk_size": 16}


def keys_of(chunks: Iterable[Path]) -> list[CacheEngineKey]:
    """Keys of chunks, as LMCache's hashes: of a chunk and of all before it."""
    return [
        key_of(sum((token + 1) * 100**depth for depth, token in enumerate(chunk)))
        for chunk in chunks
    ]


class Prompts:
    """What LMCache does for prompts, with a backend of few chunks."""

    def __init__(self, engine: MakeEngine, most: int, **settings: object) -> None:
        self.one: Engine = engine(
            {
                "rds_buffer_size": 1,
                "rds_max_chunks": most,
                "rds_write_mode": "synchronous",
                **settings,
            },
            metadata_of(**TINY),
        )
        self.backend = self.one.backend

    def store(self, chunks: Sequence[Path]) -> None:
        """Store consecutive chunks of a prompt."""
        objs: list[Any] = self.backend.batched_allocate(
            self.one.metadata.get_shapes(), self.one.metadata.get_dtypes(), len(chunks)
        )
        assert objs is not None
        try:
            self.backend.batched_submit_put_task(keys_of(chunks), objs)
        finally:
            for obj in objs:
                obj.ref_count_down()

    def read(self, chunks: Sequence[Path]) -> int:
        """Read consecutive chunks of a prompt; returns how many came."""
        objs = self.backend.batched_get_blocking(keys_of(chunks))
        came = [obj for obj in objs if obj is not None]
        for obj in came:
            obj.ref_count_down()
        return len(came)

    def serve(self, path: Path, step: int = 1) -> int:
        """A request from lookup to its last store; returns the chunks it got."""
        chunks = prompt_of(path)
        keys = keys_of(chunks)
        hits = self.backend.batched_contains(keys, pin=True)
        assert self.read(chunks[:hits]) == hits
        for key in keys[:hits]:
            assert self.backend.unpin(key)
        for at in range(hits, len(chunks), step):
            self.store(chunks[at : at + step])
        return hits


@pytest.mark.parametrize("step", [1, 2, 4], ids="{} at a time".format)
@pytest.mark.parametrize("mode", ["synchronous", "overlapped"])
def test_the_beginning_of_a_prompt_that_does_not_fit_stays(
    engine: MakeEngine, step: int, mode: str
) -> None:
    prompts = Prompts(engine, 3, rds_write_mode=mode)
    hits = []
    for _ in range(5):
        hits.append(prompts.serve((1, 2, 3, 4), step))
        prompts.one.wait_for_writes()
    assert hits == [0, 3, 3, 3, 3]
    prompts.one.assert_idle()


@pytest.mark.parametrize("step", [1, 3])
def test_another_chunk_costs_the_end_of_a_prompt(engine: MakeEngine, step: int) -> None:
    prompts = Prompts(engine, 3)
    prompts.serve((1, 2, 3), step)
    assert prompts.serve((9,)) == 0
    assert prompts.serve((1, 2, 3), step) == 2
    # The other one was the least recently used.
    assert prompts.serve((1, 2, 3), step) == 3
    assert prompts.serve((9,)) == 0


def test_the_older_of_two_prompts_goes_its_end_first(engine: MakeEngine) -> None:
    prompts = Prompts(engine, 6)
    for path in ((1, 2, 3), (4, 5, 6)):
        prompts.serve(path)
    assert prompts.read([(1,)]) == 1  # a use of its beginning alone
    prompts.serve((7, 8))
    assert prompts.serve((4, 5, 6)) == 3
    assert prompts.serve((1, 2, 3)) == 1


def test_a_chunk_behind_a_missing_one_evicts_nothing(engine: MakeEngine) -> None:
    prompts = Prompts(engine, 3)
    prompts.serve((9,))
    prompts.backend.batched_contains(keys_of(prompt_of((1, 2, 3, 4))))
    prompts.store([(1,), (1, 2)])
    prompts.store([(1, 2, 3, 4)])  # the third one was not stored
    assert prompts.serve((9,)) == 1
    assert prompts.serve((1, 2, 3, 4)) == 2


def test_a_shared_beginning_outlives_both_ends(engine: MakeEngine) -> None:
    prompts = Prompts(engine, 4)
    prompts.serve((1, 2, 3))
    prompts.serve((1, 2, 4))
    prompts.serve((8, 9))
    assert prompts.serve((1, 2, 3)) == 2


@pytest.mark.parametrize("mode", ["synchronous", "overlapped"])
def test_a_limit_is_no_failure(engine: MakeEngine, mode: str) -> None:
    """``rds_failure_policy: raise`` ends the engine for the storage's faults alone."""
    prompts = Prompts(engine, 2, rds_failure_policy="raise", rds_write_mode=mode)
    one = prompts.one
    before = one.metric("unplaced_chunks"), one.metric("write_failures")
    hits = []
    for _ in range(4):
        hits.append(prompts.serve((1, 2, 3, 4), step=2))
        prompts.one.wait_for_writes()
    assert hits == [0, 2, 2, 2]
    assert one.metric("unplaced_chunks") - before[0] == 8
    assert one.metric("write_failures") == before[1]


class Request:
    """A request under way, in the backend and in the model."""

    def __init__(self, path: Path, hits: int) -> None:
        self.chunks = prompt_of(path)
        self.pinned = self.chunks[:hits]
        self.next = hits


class Run:
    """Requests at the same time, with what goes wrong, against the model."""

    def __init__(self, engine: MakeEngine, seed: int, fail: list[bool]) -> None:
        self.chance = random.Random(seed)
        self.fail = fail
        most = self.chance.randint(4, 12)
        self.prompts = Prompts(engine, most)
        self.unplaced = self.prompts.one.metric("unplaced_chunks")
        self.model = PolicyModel(most)
        self.requests: list[Request] = []

    def path(self) -> Path:
        return tuple(
            self.chance.choices((0, 1, 2), (5, 2, 1), k=self.chance.randint(1, 7))
        )

    def begin(self) -> None:
        path = self.path()
        hits = self.model.look_up(path, pin=True)
        keys = keys_of(prompt_of(path))
        assert self.prompts.backend.batched_contains(keys, pin=True) == hits
        self.requests.append(Request(path, hits))

    def look_up(self) -> None:
        path = self.path()
        keys = keys_of(prompt_of(path))
        hits = self.model.look_up(path, pin=False)
        assert self.prompts.backend.batched_contains(keys) == hits

    def read(self, request: Request) -> None:
        skip = self.chance.randint(0, len(request.pinned))  # vLLM's own prefix cache
        wanted = request.pinned[skip:]
        assert self.prompts.read(wanted) == self.model.read(wanted)

    def unpin(self, request: Request) -> None:
        for chunk, key in zip(request.pinned, keys_of(request.pinned), strict=True):
            self.model.unpin(chunk)
            assert self.prompts.backend.unpin(key)
        request.pinned = []

    def store(self, request: Request) -> None:
        end = request.next + self.chance.randint(1, 3)
        chunks = request.chunks[request.next : end]
        self.fail[0] = self.chance.random() < 0.1
        self.model.store(chunks, self.fail[0])
        self.prompts.store(chunks)
        self.fail[0] = False
        request.next = end

    def remove(self) -> None:
        if self.model.used:
            chunk = self.chance.choice(sorted(self.model.used))
            force = self.chance.random() < 0.5
            [key] = keys_of([chunk])
            removed = self.prompts.backend.remove(key, force)
            assert removed is self.model.remove(chunk, force)

    def step(self) -> None:
        """One operation, and what must be so after it."""
        chance = self.chance
        if len(self.requests) < 4 and chance.random() < 0.3:
            self.begin()
        elif self.requests and chance.random() < 0.9:
            request = chance.choice(self.requests)
            if request.pinned and chance.random() < 0.4:
                self.read(request)
            elif request.pinned:
                self.unpin(request)
            elif request.next < len(request.chunks) and chance.random() < 0.9:
                self.store(request)
            else:  # its end, or a client that hung up
                self.requests.remove(request)
        elif chance.random() < 0.3:
            self.remove()
        else:
            self.look_up()
        index = self.prompts.backend._store.index
        assert set(index._entries) == set(keys_of(self.model.used))
        pins = +self.model.pins
        assert index._pins == dict(zip(keys_of(pins), pins.values(), strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_hits_equal_those_of_the_model(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Ten thousand operations in all."""
    fail = [False]
    write = ChunkIO.write

    def write_or_fail(self: ChunkIO, batch: Any) -> Any:
        if fail[0]:
            raise RDSError("planted")
        return write(self, batch)

    monkeypatch.setattr(ChunkIO, "write", write_or_fail)
    logging.disable(logging.ERROR)
    try:
        run = Run(engine, seed, fail)
        for _ in range(2000):
            run.step()
    finally:
        logging.disable(logging.NOTSET)
    unplaced = run.prompts.one.metric("unplaced_chunks") - run.unplaced
    assert unplaced == run.model.unplaced > 0
    run.prompts.one.assert_idle()
