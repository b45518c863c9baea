# SPDX-License-Identifier: Apache-2.0
"""Random traffic of two workers with one LMCache server, while anything fails.

``make campaign SEEDS=1..1000`` (or ``SEEDS=20`` for 1 to 20, ``SEEDS=7..7`` for one)
runs each seed in processes of its own: a server with a pool that is too small, and two
workers on an NPU each. Layout, transport, threads, the schedule of the NPU, what is
stored and loaded, and which fault strikes which worker at which step of a transfer
follow from the seed; when processes and threads come to their steps does not. A failing
seed is named, and replayed by its number.

After every step each block of both NPUs is what plain indexing on the host says, or was
reported as lost; no lock is held, and the server counts the hits that the workers had.
At the end of a seed no thread, file, mapping or segment is left. In the end it prints
how often each fault struck at each step.
"""

# Standard
from collections import Counter
from importlib import import_module
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any
import argparse
import gc
import mmap
import os
import shutil
import sys
import tempfile
import time

# First Party
import rbln_sim

ENVIRONMENT = {
    "LMCACHE_DEVICE_BACKEND": "rbln",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "WARNING",
    "TORCH_RBLN_LOG_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}


def main(arguments: list[str] | None = None) -> int:
    """Run seeds until one fails, or an interrupt; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="20", help="N, or FIRST..LAST")
    parser.add_argument("--plant", help="a fault of ours, see plants.py")
    parser.add_argument("--steps", type=int, help="of each seed; 13 if not given")
    given = parser.parse_args(arguments)
    first, _, last = given.seeds.rpartition("..")
    numbers = range(int(first or 1), int(last) + 1)
    rbln_sim.activate()
    os.environ |= ENVIRONMENT
    # LMCache and torch read the environment as they are imported.
    plants: dict[str, Any] = import_module("tests.campaigns.multiprocess.plants").PLANTS
    seed: Any = import_module("tests.campaigns.multiprocess.seed")
    seed.command_line()
    # One of all processes; it says much about segments that workers let go.
    said, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    resource_tracker.ensure_running()
    os.dup2(said, 2)
    gc.freeze()
    struck = memoryview(mmap.mmap(-1, 8 * len(seed.COUNTED))).cast("Q")
    found: Counter[str] = Counter()
    begun = time.monotonic()
    for number in numbers:
        folder = Path(tempfile.mkdtemp(prefix=f"campaign-{number}-"))
        run = seed.Run(number, folder, struck, given.plant and plants[given.plant])
        try:
            run.run(given.steps or seed.STEPS_OF_A_SEED)
        except seed.FailedError as exc:
            print(f"seed {number} failed: {exc}\n{run.options}\nlogs: {folder}")
            print(f"replay: make campaign SEEDS={number}..{number}")
            return 1
        except KeyboardInterrupt:
            shutil.rmtree(folder)
            break
        finally:
            run.close()
        shutil.rmtree(folder)
        found += run.found + Counter({"seeds": 1})
        if number % 10 == 0:
            print(f"seed {number} is fine; so far: {dict(found)}", flush=True)
    spent, took = sum(os.times()[:4]), time.monotonic() - begun
    print(f"no fault found: {dict(found)}, {spent:.0f} s of CPU, {took:.0f} s")
    for count, (kind, at) in zip(struck, seed.COUNTED, strict=True):
        print(f"{count:6} {kind:16} {at}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
