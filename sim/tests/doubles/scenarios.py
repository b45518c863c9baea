# SPDX-License-Identifier: Apache-2.0
"""What a test of a backend does, with a test double for the backend.

Every scenario compares bytes and raises when they differ; what the simulator refuses
raises by itself. Each is made for the last NPU, so that a wrong index shows.
"""

# Standard
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
import threading

# Third Party
import torch

# First Party
from sim.tests.doubles.bugs import Bug
from sim.tests.doubles.pipeline import Pipeline, make_buffers

POISON = 0xA5
LAYERS, BLOCKS, SLOTS, WIDTH = 2, 8, 2, 16
# The ones that the forward writes last, and not in order.
STORED = (7, 5, 6)
OTHERS = (0, 2, 1)


class WrongBytesError(AssertionError):
    """Bytes are not those wanted."""


class Engine:
    """A KV cache on one NPU, and the forward that writes it.

    Leaving its ``with`` block waits for its NPU, so that what a mistake left in flight
    does not write into memory that the scenario gives back.

    Args:
        seed: Of the values.
        heads: Heads per block.
    """

    def __init__(self, seed: int, heads: int = 2) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._shape = (BLOCKS, heads, SLOTS, WIDTH)
        self.device = torch.device("rbln", torch.rbln.device_count() - 1)
        self.compute = torch.rbln.Stream(self.device)
        self.layers = []
        for _ in range(LAYERS):
            layer = torch.empty(self._shape, dtype=torch.uint8, device=self.device)
            torch.rbln.bind_device_memory(layer)
            layer.copy_(torch.zeros(self._shape, dtype=torch.uint8))
            self.layers.append(layer)
        self._computed: list[torch.Tensor] = []

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        torch.rbln.synchronize(self.device)

    def values(self) -> list[torch.Tensor]:
        """Return random contents for all layers, none of them zero."""
        return [
            torch.randint(
                1, 256, self._shape, dtype=torch.uint8, generator=self._random
            )
            for _ in self.layers
        ]

    def forward(self, values: list[torch.Tensor]) -> Any:
        """Write all blocks, in order, and return the event behind them."""
        done = torch.rbln.Event()
        pinned = [layer.pin_memory() for layer in values]
        self._computed += pinned
        with torch.rbln.stream(self.compute):
            for block in range(BLOCKS):
                for layer, new in zip(self.layers, pinned, strict=True):
                    layer[block].copy_(new[block], non_blocking=True)
        done.record(self.compute)
        return done

    def buffers(self) -> list[torch.Tensor]:
        """Return staging buffers for its blocks."""
        return make_buffers(self.layers[0][0])

    def chunk(self, pinned: bool = False) -> torch.Tensor:
        """Return room for the stored blocks."""
        tokens = len(STORED) * SLOTS
        shape = (LAYERS, tokens, self._shape[1], WIDTH)
        return torch.zeros(shape, dtype=torch.uint8, pin_memory=pinned)

    def direct_chunk(self) -> torch.Tensor:
        """Return pinned room for the stored blocks as the device has them."""
        shape = (LAYERS, len(STORED), *self._shape[1:])
        return torch.zeros(shape, dtype=torch.uint8, pin_memory=True)

    def store(self, pipeline: Pipeline, forward_done: Any) -> torch.Tensor:
        """Gather on a stream of its own behind the forward, as store threads do."""
        chunk = self.chunk()
        stream = torch.rbln.Stream(self.device)
        with torch.rbln.stream(stream):
            if forward_done is not None:
                stream.wait_event(forward_done)
            pipeline.gather(self.layers, STORED, chunk)
        return chunk


def chunk_of(
    values: list[torch.Tensor], table: tuple[int, ...] = STORED
) -> torch.Tensor:
    """Return the chunk of some blocks, one token and head at a time."""
    heads = values[0].shape[1]
    chunk = torch.empty((LAYERS, len(table) * SLOTS, heads, WIDTH), dtype=torch.uint8)
    for layer, content in enumerate(values):
        for position, block in enumerate(table):
            for slot in range(SLOTS):
                for head in range(heads):
                    token = position * SLOTS + slot
                    chunk[layer, token, head] = content[block, head, slot]
    return chunk


def direct_chunk_of(values: list[torch.Tensor]) -> torch.Tensor:
    """Return the stored blocks as the device has them."""
    return torch.stack([layer[list(STORED)] for layer in values])


def compare(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Raise unless the bytes are equal, and say how much of it is poison."""
    if torch.equal(got, wanted):
        return
    wrong = got[got != wanted]
    raise WrongBytesError(
        f"{what}: {wrong.numel()} of {wanted.numel()} bytes are wrong, "
        f"{int((wrong == POISON).sum())} of them poison"
    )


def store(bug: Bug | None, seed: int) -> None:
    """A thread stores what the second of two forwards wrote."""
    with Engine(seed) as engine, ThreadPoolExecutor(1) as thread:
        old, new = engine.values(), engine.values()
        before = engine.forward(old)
        before.synchronize()
        done: Any = engine.forward(new)
        if bug is Bug.NO_WAIT_FOR_FORWARD:
            done = None
        if bug is Bug.WAIT_FOR_WRONG_EVENT:
            done = before
        pipeline = Pipeline(engine.buffers(), bug)
        chunk = thread.submit(engine.store, pipeline, done).result()
        compare(chunk, chunk_of(new), "the chunk")


def two_stores(bug: Bug | None, seed: int) -> None:
    """Two threads store two KV caches at once and read in step."""
    with (
        Engine(seed) as one,
        Engine(seed + 1000) as other,
        ThreadPoolExecutor(2) as threads,
    ):
        buffers = [one.buffers(), other.buffers()]
        if bug is Bug.SHARED_STAGING:
            buffers = [buffers[0], buffers[0]]
        in_step = threading.Barrier(2, timeout=120)
        pipelines = [
            Pipeline(staging, bug, before_read=in_step.wait) for staging in buffers
        ]
        if bug is Bug.OTHER_THREADS_EVENT:
            pipelines[0].waits_like = pipelines[1]

        def run(engine: Engine, pipeline: Pipeline) -> None:
            values = engine.values()
            chunk = engine.store(pipeline, engine.forward(values))
            compare(chunk, chunk_of(values), "the chunk of a thread")

        list(threads.map(run, [one, other], pipelines))


def failed_store(bug: Bug | None, seed: int) -> None:
    """A store fails between two copies; the next user gets its buffers."""
    with Engine(seed) as engine:
        pool = engine.buffers()
        done = engine.forward(engine.values())
        stream = torch.rbln.Stream(engine.device)
        with torch.rbln.stream(stream):
            stream.wait_event(done)
            try:
                Pipeline(pool, bug).gather(
                    engine.layers, [STORED[0], BLOCKS], engine.chunk()
                )
            except IndexError:
                pass  # there is no such block
            else:
                raise WrongBytesError("a block was stored that does not exist")
        for buffer in pool:
            buffer.fill_(7)
        torch.rbln.synchronize(engine.device)
        for buffer in pool:
            compare(buffer, torch.full_like(buffer, 7), "a buffer of the next user")


def private_store(bug: Bug | None, seed: int) -> None:
    """A store on a stream of its own, for a caller whose stream is the forward's."""
    with Engine(seed) as engine:
        values = engine.values()
        engine.forward(values)
        chunk = engine.chunk()
        private = torch.rbln.Stream(engine.device)
        with torch.rbln.stream(engine.compute):
            if bug is not Bug.PRIVATE_STREAM_ALONE:
                private.wait_stream(torch.rbln.current_stream(engine.device))
            with torch.rbln.stream(private):
                Pipeline(engine.buffers(), bug).gather(engine.layers, STORED, chunk)
        compare(chunk, chunk_of(values), "the chunk")


def overtaken_store(bug: Bug | None, seed: int) -> None:
    """A store is queued, and behind it the forward that writes the same blocks."""
    with Engine(seed) as engine:
        stored = engine.values()
        done = engine.forward(stored)
        chunk = engine.direct_chunk()
        stream = torch.rbln.Stream(engine.device)
        with torch.rbln.stream(stream):
            stream.wait_event(done)
            for layer, blocks in zip(engine.layers, chunk, strict=True):
                for block, target in zip(STORED, blocks, strict=True):
                    target.copy_(layer[block], non_blocking=True)
        copied = stream.record_event()
        if bug is not Bug.SOURCE_OVERWRITTEN:
            engine.compute.wait_event(copied)
        engine.forward(engine.values()).synchronize()
        copied.synchronize()
        compare(chunk, direct_chunk_of(stored), "the chunk")


def failing_store(bug: Bug | None, seed: int) -> None:
    """The second copy of a store fails while another thread watches a stream."""
    engine = Engine(seed)
    values = engine.values()
    done = engine.forward(values)
    watched = torch.rbln.Stream(engine.device)
    stream = watched if bug is Bug.ERROR_TAKEN else torch.rbln.Stream(engine.device)
    chunk = engine.direct_chunk()

    def watch() -> None:
        with suppress(RuntimeError):
            watched.record_event().synchronize()

    with ThreadPoolExecutor(1) as thread, torch.rbln.stream(stream):
        stream.wait_event(done)
        for layer, blocks in zip(engine.layers, chunk, strict=True):
            for block, target in zip(STORED, blocks, strict=True):
                target.copy_(layer[block], non_blocking=True)
            thread.submit(watch).result()
        try:
            stream.synchronize()
        except RuntimeError:
            return
    compare(chunk, direct_chunk_of(values), "the chunk of a store that succeeded")
    raise AssertionError("no copy failed")


def load(bug: Bug | None, seed: int) -> None:
    """Blocks are restored behind a forward, on its stream."""
    with Engine(seed) as engine:
        _load(engine, bug, pinned=False)


def direct_load(bug: Bug | None, seed: int) -> None:
    """Blocks of one head are restored straight from the chunk, which is then reused."""
    with Engine(seed, heads=1) as engine:
        _load(engine, bug, pinned=True)


def pooled_loads(bug: Bug | None, seed: int) -> None:
    """Two loads, each on a stream of its own, take their buffers from one pool."""
    with Engine(seed) as engine:
        restored = engine.values()
        pool = engine.buffers()
        engine.forward(engine.values()).synchronize()
        for table in (STORED, OTHERS):
            with torch.rbln.stream(torch.rbln.Stream(engine.device)):
                Pipeline(pool, bug).scatter(
                    engine.layers, table, chunk_of(restored, table)
                )
        torch.rbln.synchronize(engine.device)
        for layer, new in zip(engine.layers, restored, strict=True):
            got = layer.cpu()
            for block in STORED + OTHERS:
                compare(got[block], new[block], f"block {block}")


def _load(engine: Engine, bug: Bug | None, pinned: bool) -> None:
    restored, computed = engine.values(), engine.values()
    chunk = engine.chunk(pinned)
    chunk.copy_(chunk_of(restored))
    pipeline = Pipeline(engine.buffers(), bug)
    engine.forward(computed)
    with torch.rbln.stream(engine.compute):
        pipeline.scatter(engine.layers, STORED, chunk)
    chunk.fill_(0)
    torch.rbln.synchronize(engine.device)
    for layer, old, new in zip(engine.layers, computed, restored, strict=True):
        wanted = old.clone()
        for block in STORED:
            wanted[block] = new[block]
        compare(layer.cpu(), wanted, "a layer")
