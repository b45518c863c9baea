# SPDX-License-Identifier: Apache-2.0
"""Readers, writers and an evictor at once: exact bytes or nothing."""

# Standard
from collections import Counter
from collections.abc import Callable
import random
import sys
import threading
import time

# Third Party
from rds_support import Engine, content_of, key_of
import pytest
import torch

# First Party
from lmcache_rbln.storage_plugin.rds.staging import StagedMemoryObj

pytestmark = [pytest.mark.npu, pytest.mark.slow]

# Steps of each reader and writer, with which the evictor goes on. Nothing of it takes
# longer, unless it hangs.
STEPS = 3000
LIMIT_S = 600
READERS = 8
WRITERS = 2
CHUNKS = 24
NEVER = ("rejected_chunks", "read_failures")


def test_eight_readers_two_writers_and_an_evictor(
    engine: Callable[..., Engine],
) -> None:
    one = engine({"rds_buffer_size": 3, "rds_max_chunks": 12, "rds_wait_timeout": 2})
    backend = one.backend
    want = {
        n: torch.frombuffer(bytearray(content_of(n)), dtype=torch.uint8)
        for n in range(CHUNKS)
    }
    before = [one.metric(name) for name in NEVER]
    counts: Counter[str] = Counter()
    problems: list[str] = []
    ended = threading.Event()

    def run(name: str, step: Callable[[random.Random], str], steps: int) -> None:
        chance = random.Random(name)
        mine: Counter[str] = Counter()
        try:
            while mine.total() < steps and not ended.is_set() and not problems:
                mine[step(chance)] += 1
        except BaseException as error:
            problems.append(f"{name}: {error!r}")
        counts.update(mine)

    def read(chance: random.Random) -> str:
        numbers = [chance.randrange(CHUNKS) for _ in range(chance.randint(1, 3))]
        keys = [key_of(number) for number in numbers]
        pinned = backend.batched_contains(keys, pin=chance.random() < 0.3)
        objs = backend.batched_get_blocking(keys)
        for number, obj in zip(numbers, objs, strict=True):
            if obj is None:
                continue
            assert isinstance(obj, StagedMemoryObj)
            if not torch.equal(obj.slot.payload.cpu(), want[number]):
                problems.append(f"wrong bytes in chunk {number}")
            obj.ref_count_down()
        for key in keys[:pinned]:
            backend.unpin(key)
        return "hit" if objs[0] is not None else "miss"

    def write(chance: random.Random) -> str:
        number = chance.randrange(CHUNKS)
        obj = backend.allocate(
            one.metadata.get_shapes(), one.metadata.get_dtypes(), None
        )
        if obj is None:
            return "no memory"
        assert isinstance(obj, StagedMemoryObj)
        obj.slot.payload.copy_(want[number])
        stored = backend.batched_submit_put_task([key_of(number)], [obj])
        obj.ref_count_down()
        return "written" if stored else "was there"

    def evict(chance: random.Random) -> str:
        time.sleep(0.002)
        backend.remove(key_of(chance.randrange(CHUNKS)), force=chance.random() < 0.5)
        return "evicted"

    jobs = [(f"reader {i}", read, STEPS) for i in range(READERS)]
    jobs += [(f"writer {i}", write, STEPS) for i in range(WRITERS)]
    threads = [threading.Thread(target=run, args=job) for job in jobs]
    evictor = threading.Thread(target=run, args=("evictor", evict, sys.maxsize))
    for thread in (*threads, evictor):
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    ended.set()
    evictor.join(LIMIT_S)
    assert not problems
    assert not any(thread.is_alive() for thread in (*threads, evictor))
    assert counts["hit"] and counts["miss"] and counts["written"] and counts["evicted"]
    one.wait_for_writes()
    one.assert_idle()
    assert [one.metric(name) for name in NEVER] == before
