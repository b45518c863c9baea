# SPDX-License-Identifier: Apache-2.0
"""A transfer whose failure somebody else is told of before its copies are all issued.

Usage: ``rds_told_elsewhere.py transfer|gather|scatter``, in an environment whose
``RBLN_SIM_FAULTS`` make the second copy of it fail. Behind each copy the whole device
is waited for, as any other thread may do. Prints a JSON object:

told
    Errors that those waits were told of.
raised
    Whether the transfer raised one.
again
    Whether the same transfer, tried again, moved the right bytes.
"""

# Standard
from typing import Any
import json
import sys

# Third Party
from kv_reference import Case, random_bits, upload
import torch

# First Party
from lmcache_rbln.device_streams import Copies, streams_of
from lmcache_rbln.paged_kv import ChunkBlocks, PagedKV
from lmcache_rbln.paged_kv_device import DeviceBlockTransfer
from lmcache_rbln.storage_plugin.rds_device import RDSDevice
from lmcache_rbln.storage_plugin.rds_staging import StagingAllocator

DEVICE = "rbln:0"
IDS = [7, 5, 3, 1]
rbln: Any = torch.rbln  # type: ignore[attr-defined]
told = 0


def wait_for_device() -> None:
    """Wait for all that is queued, as a thread that knows nothing of the transfer."""
    global told
    try:
        rbln.synchronize()
    except RuntimeError:
        told += 1


def run(what: str) -> dict[str, object]:
    """Run a transfer twice; see the module."""
    copy = Copies.copy

    def copy_and_wait(
        self: Copies, target: torch.Tensor, source: torch.Tensor
    ) -> torch.Event:
        event = copy(self, target, source)
        wait_for_device()
        return event

    case = Case("blocks_first", num_layers=1, num_blocks=8, block_size=4)
    host = random_bits(case.layer_shape, case.dtype, 0)
    layer = upload(host, DEVICE)
    kv = PagedKV.of([layer])
    want = host[IDS].contiguous().view(torch.uint8).flatten()
    device = RDSDevice(torch.device(DEVICE), numa_node=0)
    obj = StagingAllocator(device, 1 << 20, want.numel()).allocate(
        torch.Size([2, 1, 16, 4]), case.dtype
    )
    assert obj is not None
    held = obj.slot.payload[: want.numel()]
    chunks = [ChunkBlocks(obj, 16, IDS, 0)]
    if what == "scatter":
        DeviceBlockTransfer().gather(kv, chunks)
        layer.copy_(torch.zeros_like(host))
    Copies.copy = copy_and_wait  # type: ignore[method-assign]

    def move() -> bool:
        if what == "scatter":
            DeviceBlockTransfer().scatter(kv, chunks)
            now = layer.cpu()[IDS].contiguous().view(torch.uint8).flatten()
            return torch.equal(now, want)
        if what == "gather":
            DeviceBlockTransfer().gather(kv, chunks)
        else:
            parts = held.view(torch.uint8).split(want.numel() // len(IDS))
            with streams_of(kv.device).transfer(ordered=True) as copies:
                for part, block in zip(parts, IDS, strict=True):
                    copies.copy(part, layer[block].view(torch.uint8).flatten())
        return torch.equal(held.cpu(), want)

    raised = False
    try:
        move()
    except RuntimeError:
        raised = True
    return {"told": told, "raised": raised, "again": move()}


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))
