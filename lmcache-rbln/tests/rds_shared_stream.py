# SPDX-License-Identifier: Apache-2.0
"""Transfers of several threads over one caller's stream, while copies fail.

Usage: ``rds_shared_stream.py THREADS TRANSFERS``, in an environment whose
``RBLN_SIM_FAULTS`` make copies fail. Another thread records and waits for events on the
callers' stream all the time, so that it is told of a failure before anybody else could
be. A transfer is one copy. Prints a JSON object:

transfers, raised
    Transfers, and those of them that raised an error.
silent
    Transfers that raised none and moved other bytes.
bystander
    Errors that the thread on the callers' stream was told of.
free, slots
    Staging slots that are free at the end, and all.
"""

# Standard
from collections import Counter
import json
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
BLOCKS_PER_THREAD = 4


def run(threads: int, transfers: int) -> dict[str, int]:
    """Run transfers in threads; see the module."""
    case = Case(
        "blocks_first",
        num_layers=1,
        num_blocks=BLOCKS_PER_THREAD * threads,
        block_size=4,
    )
    host = random_bits(case.layer_shape, case.dtype, 0)
    layer = upload(host, DEVICE)
    kv = PagedKV.of([layer])
    block_bytes = host[0].numel() * host.dtype.itemsize
    device = RDSDevice(torch.device(DEVICE), numa_node=0)
    allocator = StagingAllocator(device, 1 << 20, block_bytes)
    transfer = DeviceBlockTransfer()
    shared = torch.rbln.Stream(device=DEVICE)
    counts: Counter[str] = Counter(transfers=0, raised=0, silent=0, bystander=0)
    lock = threading.Lock()
    over = threading.Event()

    def work(thread: int) -> None:
        mine: Counter[str] = Counter()
        blocks = range(BLOCKS_PER_THREAD * thread, BLOCKS_PER_THREAD * (thread + 1))
        twin = {block: host[block] for block in blocks}
        for number in range(transfers // threads // 2):
            source = blocks[number % BLOCKS_PER_THREAD]
            target = blocks[(number * 3 + 1) % BLOCKS_PER_THREAD]
            obj = allocator.allocate(torch.Size([2, 1, 4, 4]), case.dtype)
            assert obj is not None
            steps = (
                (transfer.gather, source, obj.slot.payload[:block_bytes]),
                (transfer.scatter, target, layer[target]),
            )
            for move, block, moved in steps:
                mine["transfers"] += 1
                try:
                    with torch.rbln.stream(shared):
                        move(kv, [ChunkBlocks(obj, 4, [block], 0)])
                except RuntimeError:
                    mine["raised"] += 1
                    if move == transfer.scatter:
                        twin[target] = layer[target].cpu()  # anything by now
                    break
                bits = moved.cpu().view(torch.uint8).flatten()
                if not torch.equal(bits, twin[source].view(torch.uint8).flatten()):
                    mine["silent"] += 1
                if move == transfer.scatter:
                    twin[target] = twin[source]
            obj.ref_count_down()
        with lock:
            counts.update(mine)

    def stand_by() -> None:
        while not over.is_set():
            try:
                event = torch.rbln.Event()
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


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]))))
