# SPDX-License-Identifier: Apache-2.0
"""Transfers of several threads over one caller's stream, while copies fail.

Usage: ``rds_shared_stream.py THREADS TRANSFERS COPIES``, in an environment whose
``RBLN_SIM_FAULTS`` make copies fail. Another thread records and waits for events on the
callers' stream all the time, so that it is told of a failure before anybody else could
be. A transfer moves so many single blocks. Prints a JSON object:

transfers, raised
    Transfers, and those of them that raised an error.
silent
    Transfers that raised none and moved other bytes.
spurious
    Transfers that raised an error and moved the right bytes.
bystander
    Errors that the thread on the callers' stream was told of.
free, slots
    Staging slots that are free at the end, and all.
"""

# Standard
from collections import Counter
from typing import Any
import json
import random
import sys
import threading

# Third Party
from kv_reference import Case, random_bits, upload
import torch

# First Party
from lmcache_rbln.paged_kv import ChunkBlocks, PagedKV
from lmcache_rbln.paged_kv_device import DeviceBlockTransfer
from lmcache_rbln.storage_plugin.rds_device import RDSDevice
from lmcache_rbln.storage_plugin.rds_staging import StagingAllocator

DEVICE = "rbln:0"
rbln: Any = torch.rbln  # type: ignore[attr-defined]


def run(threads: int, transfers: int, copies: int) -> dict[str, int]:
    """Run transfers in threads; see the module."""
    case = Case(
        "blocks_first",
        num_layers=1,
        num_blocks=2 * copies * threads,
        block_size=4,
    )
    host = random_bits(case.layer_shape, case.dtype, 0)
    layer = upload(host, DEVICE)
    kv = PagedKV.of([layer])
    chunk_bytes = copies * host[0].numel() * host.dtype.itemsize
    device = RDSDevice(torch.device(DEVICE), numa_node=0)
    allocator = StagingAllocator(device, 1 << 20, chunk_bytes)
    transfer = DeviceBlockTransfer()
    shared = rbln.Stream(device=DEVICE)
    counts = Counter(transfers=0, raised=0, silent=0, spurious=0, bystander=0)
    lock = threading.Lock()
    over = threading.Event()

    def work(thread: int) -> None:
        mine: Counter[str] = Counter()
        chance = random.Random(thread)
        first = 2 * copies * thread
        blocks = range(first, first + 2 * copies)
        twin = host.clone()
        for _ in range(transfers // threads // 2):
            # Descending: no two neighbours go in one copy.
            ids = sorted(chance.sample(blocks, 2 * copies), reverse=True)
            halves = ids[::2], ids[1::2]
            source, target = chance.sample(halves, 2)
            obj = allocator.allocate(torch.Size([2, 1, 4, 4]), case.dtype)
            assert obj is not None
            held = obj.slot.payload[:chunk_bytes]
            held.zero_()
            want = bits(twin[source])
            for move, where in ((transfer.gather, source), (transfer.scatter, target)):
                failed = False
                try:
                    with rbln.stream(shared):
                        move(kv, [ChunkBlocks(obj, 4 * copies, where, 0)])
                except RuntimeError:
                    failed = True
                gathered = move == transfer.gather
                now = layer.cpu()
                right = torch.equal(held.cpu() if gathered else bits(now[where]), want)
                mine["transfers"] += 1
                mine["raised"] += failed
                mine["silent"] += not failed and not right
                mine["spurious"] += failed and right
                if not gathered:
                    twin[where] = now[where]
                if failed:
                    # What a failure left is copied nowhere: over the same bytes, the
                    # next one would change nothing.
                    for block in () if gathered else where:
                        layer[block].copy_(host[block])
                        twin[block] = host[block]
                    break
            obj.ref_count_down()
        with lock:
            counts.update(mine)

    def stand_by() -> None:
        while not over.is_set():
            try:
                event = rbln.Event()
                event.record(shared)
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
    assert allocator.memcheck()
    return {**counts, "free": allocator.free_slots, "slots": allocator.num_slots}


def bits(blocks: torch.Tensor) -> torch.Tensor:
    """The bytes of blocks on the host."""
    return blocks.contiguous().view(torch.uint8).flatten()


if __name__ == "__main__":
    print(json.dumps(run(*map(int, sys.argv[1:]))))
