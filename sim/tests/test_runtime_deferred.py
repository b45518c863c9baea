# SPDX-License-Identifier: Apache-2.0
"""Deferred mode across processes: the same seed and calls are the same schedule."""

# Standard
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
import json
import os
import subprocess
import sys

# Third Party
import pytest

# First Party
from rbln_sim.pytest_plugin import RunPython

pytestmark = pytest.mark.sim

# Copies of both directions on three streams with edges between them, by two threads
# that take turns; some are waited for, some are asked about.
PROGRAM = """
from concurrent.futures import ThreadPoolExecutor
import torch
cache = torch.zeros(64, 256, dtype=torch.uint8, device="rbln")
torch.rbln.bind_device_memory(cache)
pinned = torch.ones(64, 256, dtype=torch.uint8, pin_memory=True)
streams = [torch.rbln.Stream() for _ in range(3)]
asked = []

def step(number):
    stream = streams[number % 3]
    row = number * 7 % 64
    size = 1 + number
    with torch.rbln.stream(stream):
        if number % 2:
            cache[row, :size].copy_(pinned[row, :size], non_blocking=True)
        else:
            pinned[row, :size].copy_(cache[row, :size], non_blocking=True)
    if number % 5 == 0:
        streams[(number + 1) % 3].wait_stream(stream)
    if number % 7 == 0:
        asked.append(stream.query())
    if number % 11 == 0:
        stream.record_event().synchronize()

threads = [ThreadPoolExecutor(1), ThreadPoolExecutor(1)]
for number in range(100):
    threads[number % 2].submit(step, number).result()
torch.rbln.synchronize()
print(asked)
"""


def _schedule(
    rbln_sim_fork: RunPython, trace: Path, deferred: str
) -> tuple[list[tuple[object, ...]], str]:
    """Run the program; return what ran in which order, and what it was answered."""
    done = rbln_sim_fork(PROGRAM, RBLN_SIM_DEFERRED=deferred, RBLN_SIM_TRACE=str(trace))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    threads = list(dict.fromkeys(line["thread"] for line in lines))
    for line in lines:
        line["thread"] = threads.index(line["thread"])
        for varies in ("pid", "begin", "end"):
            del line[varies]
    return [tuple(line.values()) for line in lines], done.stdout


@contextmanager
def _load() -> Iterator[None]:
    """Keep the machine's CPUs busy."""
    count = max(4, 2 * (os.cpu_count() or 1))
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def test_the_same_seed_is_the_same_schedule_beside_a_machine_under_load(
    rbln_sim_fork: RunPython, tmp_path: Path
) -> None:
    quiet = _schedule(rbln_sim_fork, tmp_path / "quiet", "7")
    other = _schedule(rbln_sim_fork, tmp_path / "other", "8")
    with _load():
        loaded = _schedule(rbln_sim_fork, tmp_path / "loaded", "7")
    assert len(quiet[0]) >= 100 and "True" in quiet[1] and "False" in quiet[1]
    assert quiet == loaded
    assert quiet[0] != other[0]
