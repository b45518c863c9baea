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
from typing import Any
import json
import logging
import sys
import threading

# Third Party
from rds_support import Engine, config_of, content_of, key_of, metadata_of
import torch

# First Party
from lmcache_rbln.storage_plugin.rds_backend import RDSBackend
from lmcache_rbln.storage_plugin.rds_staging import StagedMemoryObj

DEVICE = "rbln:0"
rbln: Any = torch.rbln  # type: ignore[attr-defined]


def run(threads: int, rounds: int) -> dict[str, int]:
    """Store and restore in threads; see the module."""
    settings = {"rds_write_mode": "synchronous", "rds_max_chunks": 8}
    one = Engine(RDSBackend(config_of(settings), metadata_of(), None, None, DEVICE))
    backend = one.backend
    # Uploaded before any thread begins, so that only the backend's copies can fail.
    device = torch.device(DEVICE)
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
    counts: Counter[str] = Counter(stored=0, restored=0, wrong=0, bystander=0)
    lock = threading.Lock()
    over = threading.Event()

    def work(thread: int) -> None:
        mine: Counter[str] = Counter()
        key = key_of(thread)
        # Not the default stream: that is the bystander's.
        with rbln.stream(rbln.Stream(device=device)):
            for _ in range(rounds):
                obj = backend.allocate(
                    one.metadata.get_shapes(), one.metadata.get_dtypes()
                )
                assert isinstance(obj, StagedMemoryObj)
                obj.slot.payload.copy_(uploads[thread])
                backend.batched_submit_put_task([key], [obj])
                obj.ref_count_down()
                mine["stored"] += backend.contains(key)
                back = backend.get_blocking(key)
                if back is not None:
                    assert isinstance(back, StagedMemoryObj)
                    mine["restored"] += 1
                    same = torch.equal(_down(back.slot.payload), contents[thread])
                    mine["wrong"] += not same
                    back.ref_count_down()
                backend.remove(key)
        with lock:
            counts.update(mine)

    def stand_by() -> None:
        while not over.is_set():
            try:
                event = rbln.Event()
                event.record(rbln.default_stream(device))
                event.synchronize()
            except RuntimeError:
                counts["bystander"] += 1

    watcher = threading.Thread(target=stand_by)
    watcher.start()
    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    over.set()
    watcher.join()
    allocator = backend._allocator
    assert allocator.memcheck()
    result = {
        **counts,
        "free": allocator.free_slots,
        "slots": allocator.num_slots,
        "lost": len(backend._writer._transfer._checksum._lost),
    }
    backend.close()
    return result


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
