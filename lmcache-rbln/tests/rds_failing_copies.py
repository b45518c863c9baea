# SPDX-License-Identifier: Apache-2.0
"""Stores and restores of several threads, while copies of the device fail.

Usage: ``rds_failing_copies.py THREADS ROUNDS``, in an environment whose
``RBLN_SIM_FAULTS`` make copies fail. Another thread works on the default stream, as the
engine does. Prints a JSON object:

stored, restored
    Chunks that were written, and that came back.
wrong
    Chunks that came back with other bytes.
bystander
    Errors that the thread on the default stream was told of.
free, slots
    Staging slots that are free at the end, and all.
lost
    Host buffers that were given up.
"""

# Standard
from collections import Counter
from functools import partial
from typing import Any
import json
import logging
import sys

# Third Party
from beside_waiters import rbln, run_beside_waiters
from rds_support import Engine, config_of, content_of, key_of, metadata_of
import torch

# First Party
from lmcache_rbln.storage_plugin.rds.staging import StagedMemoryObj
from lmcache_rbln.storage_plugin.rds_backend import RDSBackend

DEVICE = torch.device("rbln:0")


def run(threads: int, rounds: int) -> dict[str, int]:
    """Store and restore in threads; see the module."""
    settings = {"rds_write_mode": "synchronous", "rds_max_chunks": 8}
    backend = RDSBackend(config_of(settings), metadata_of(), None, None, "rbln:0")
    one = Engine(backend)
    # Uploaded before any thread begins, so that only the backend's copies can fail.
    contents = [
        torch.frombuffer(bytearray(content_of(number)), dtype=torch.uint8)
        for number in range(threads)
    ]
    uploads = []
    for content in contents:
        upload = backend._device.empty(content.numel())
        while not torch.equal(_down(upload), content):
            try:
                upload.copy_(content)
            except RuntimeError:
                continue
        uploads.append(upload)

    def work(thread: int, counts: Counter[str]) -> None:
        key = key_of(thread)
        # Not the default stream: that is the bystander's.
        with rbln.stream(rbln.Stream(device=DEVICE)):
            for _ in range(rounds):
                obj: Any = backend.allocate(
                    one.metadata.get_shapes(), one.metadata.get_dtypes()
                )
                obj.payload.copy_(uploads[thread])
                backend.batched_submit_put_task([key], [obj])
                obj.ref_count_down()
                counts["stored"] += backend.contains(key)
                back = backend.get_blocking(key)
                if back is not None:
                    assert isinstance(back, StagedMemoryObj)
                    counts["restored"] += 1
                    same = torch.equal(_down(back.payload), contents[thread])
                    counts["wrong"] += not same
                    back.ref_count_down()
                backend.remove(key)

    counts = run_beside_waiters(
        rbln.default_stream(DEVICE), [partial(work, n) for n in range(threads)]
    )
    allocator = backend.get_memory_allocator()
    assert allocator.memcheck()
    backend.close()
    return {
        **counts,
        "free": allocator.free_slots,
        "slots": allocator.num_slots,
        "lost": len(backend._store.io._lost),
    }


def _down(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of the device, tried until no fault strikes."""
    while True:
        try:
            return tensor.cpu()
        except RuntimeError:
            continue


if __name__ == "__main__":
    logging.disable(logging.ERROR)
    print(json.dumps(run(*map(int, sys.argv[1:]))))
