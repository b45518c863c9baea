# SPDX-License-Identifier: Apache-2.0
"""Transfers of several threads over one caller's stream, while copies fail.

Usage: ``rds_shared_stream.py THREADS TRANSFERS COPIES``, in an environment whose
``RBLN_SIM_FAULTS`` make copies fail. Another thread records and waits for events on the
callers' stream all the time. A transfer moves so many single blocks. Prints a JSON
object:

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
from functools import partial
import json
import logging
import random
import sys

# Third Party
from beside_waiters import rbln, run_beside_waiters
from kv_reference import Case, random_bits, upload
from rds_support import device_chunks, paged_kv_of, staged
import torch

DEVICE = "rbln:0"


def run(threads: int, transfers: int, copies: int) -> dict[str, int]:
    """Run transfers in threads; see the module."""
    case = Case(
        "blocks_first", num_layers=1, num_blocks=2 * copies * threads, block_size=4
    )
    host = random_bits(case.layer_shape, case.dtype, 0)
    layer = upload(host, DEVICE)
    kv = paged_kv_of(case, 4 * copies)
    chunk_bytes = copies * host[0].numel() * host.dtype.itemsize
    allocator = device_chunks(chunk_bytes)
    shared = rbln.Stream(device=DEVICE)

    def work(thread: int, counts: Counter[str]) -> None:
        chance = random.Random(thread)
        first = 2 * copies * thread
        blocks = range(first, first + 2 * copies)
        twin = host.clone()
        for _ in range(transfers // threads // 2):
            # Descending: no two neighbours go in one copy.
            ids = sorted(chance.sample(blocks, 2 * copies), reverse=True)
            source, target = chance.sample((ids[::2], ids[1::2]), 2)
            obj = staged(allocator, case)
            held = obj.payload[:chunk_bytes]
            held.zero_()
            want = bits(twin[source])
            for gathers, where in ((True, source), (False, target)):
                move = kv.from_gpu if gathers else kv.to_gpu
                slots = torch.tensor([4 * b + t for b in where for t in range(4)])
                failed = False
                try:
                    with rbln.stream(shared):
                        move(obj, 0, len(slots), kvcaches=[layer], slot_mapping=slots)
                except RuntimeError:
                    failed = True
                now = layer.cpu()
                right = torch.equal(held.cpu() if gathers else bits(now[where]), want)
                counts["transfers"] += 1
                counts["raised"] += failed
                counts["silent"] += not failed and not right
                counts["spurious"] += failed and right
                if not gathers:
                    twin[where] = now[where]
                if failed:
                    # What a failure left is copied nowhere: over the same bytes, the
                    # next one would change nothing.
                    for block in () if gathers else where:
                        layer[block].copy_(host[block])
                        twin[block] = host[block]
                    break
            obj.ref_count_down()

    counts = run_beside_waiters(shared, [partial(work, n) for n in range(threads)])
    assert allocator.memcheck()
    return {**counts, "free": allocator.free_slots, "slots": allocator.num_slots}


def bits(blocks: torch.Tensor) -> torch.Tensor:
    """The bytes of blocks on the host."""
    return blocks.contiguous().view(torch.uint8).flatten()


if __name__ == "__main__":
    logging.disable(logging.ERROR)
    print(json.dumps(run(*map(int, sys.argv[1:]))))
