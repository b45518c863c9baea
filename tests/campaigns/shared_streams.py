# SPDX-License-Identifier: Apache-2.0
"""Transfers of four threads over one caller's stream, with copies that fail.

    python tests/campaigns/shared_streams.py --transfers 100000

Every thread stores and restores its own blocks of four caches: few large pieces, many
small ones that are collected, and MLA in place and staged. All of them have the same
current stream, on which one more thread waits all the time; another one waits for the
whole device. It is shown that

- a transfer that returns has moved the right bytes;
- the transfers that raise are exactly those that a failed copy of the simulator's trace
  belongs to, by thread and time;
- all staging is free at the end.

It prints a summary as JSON, and exits with 1 if one of these does not hold.
"""

# Future
from __future__ import annotations

# Standard
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
import argparse
import collections
import json
import os
import sys
import tempfile
import threading
import time

FAULTS = "fail:d2h:p=0.002,fail:h2d:p=0.002"
THREADS = 4
BLOCKS = 4
#: A wait for anything takes no longer, however slow the machine is.
LIMIT_S = 3600.0


@dataclass
class Record:
    """What one thread has done.

    Attributes:
        thread: The kernel's number of the thread.
        begins: When each transfer began, in nanoseconds of the monotonic clock.
        ends: When it returned or raised.
        raised: Whether it raised.
        silent: Numbers of those that returned with wrong bytes.
    """

    thread: int = 0
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    raised: list[bool] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)


def run(transfers: int) -> dict[str, Any]:
    """Run the threads. torch must find the simulator with its faults.

    Args:
        transfers: How many in all.

    Returns:
        ``records`` of the threads, and figures for the summary.
    """
    # Third Party
    from kv_reference import Case, as_bytes, random_bits, transfer, upload
    import torch

    # First Party
    from lmcache.v1.platform.devices.rbln import copy_costs, staging

    device = torch.device("rbln:0")
    # As on hardware, where small pieces are collected.
    copy_costs._measured[device] = copy_costs.HARDWARE_DESCRIPTOR_US
    blocks = BLOCKS * THREADS
    # Blocks of 4 tokens: 2, 24, 2 and 8 pieces of each store.
    cases = [
        (Case("blocks_first", 2, blocks, 2, 4, 64), False),
        (Case("kv_first", 3, blocks, 2, 4, 16), False),
        (Case("mla", 2, blocks, 1, 4, 64), True),
        (Case("mla", 2, blocks, 1, 4, 64), False),
    ]

    def until_uploaded(tensor: torch.Tensor) -> torch.Tensor:
        while True:
            try:
                return upload(tensor, str(device))
            except RuntimeError:
                # It is a fault's, and no transfer's.
                continue

    caches = [
        [
            until_uploaded(random_bits(case.layer_shape, case.dtype, layer))
            for layer in range(case.num_layers)
        ]
        for case, _ in cases
    ]
    shared = torch.rbln.Stream(device)
    over = threading.Event()

    def work(number: int) -> Record:
        record = Record(threading.get_native_id())
        ids = [BLOCKS * number + offset for offset in (2, 0, 3, 1)]

        def attempt(index: int, to_chunks: bool, chunk: torch.Tensor) -> bool:
            case = cases[index][0]
            tokens = BLOCKS * case.block_size
            record.begins.append(time.monotonic_ns())
            try:
                transfer(case, to_chunks, caches[index], [chunk], ids, tokens)
                record.raised.append(False)
            except RuntimeError:
                record.raised.append(True)
            record.ends.append(time.monotonic_ns())
            return not record.raised[-1]

        contents, chunks = [], []
        for index, (case, pinned) in enumerate(cases):
            shape = case.chunk_shape(BLOCKS * case.block_size)
            contents.append(
                [
                    random_bits(shape, case.dtype, 100 * number + 10 * index + turn)
                    for turn in range(7)
                ]
            )
            if pinned:
                contents[-1] = [content.pin_memory() for content in contents[-1]]
            chunk = torch.empty(shape, dtype=case.dtype, pin_memory=pinned)
            chunks.append(chunk)
        turn = number
        with torch.rbln.stream(shared):
            while len(record.ends) < transfers // THREADS:
                turn += 1
                index = turn % len(cases)
                stored, loaded = contents[index][turn % 7], chunks[index]
                if not attempt(index, False, stored):
                    continue
                for _ in range(2):
                    as_bytes(loaded).zero_()
                    loaded.view(torch.uint8).zero_()
                    if not attempt(index, True, loaded):
                        continue
                    if not torch.equal(as_bytes(loaded), as_bytes(stored)):
                        record.silent.append(len(record.ends) - 1)
        return record

    def wait(for_device: bool) -> int:
        told = 0
        event = torch.rbln.Event()
        with torch.rbln.stream(shared):
            while not over.is_set():
                try:
                    if for_device:
                        torch.rbln.synchronize(device)
                    else:
                        event.record(shared)
                        event.synchronize()
                except RuntimeError:
                    told += 1
                time.sleep(0.0005)
        return told

    with ThreadPoolExecutor(THREADS + 2) as executor:
        waiting = [executor.submit(wait, for_device) for for_device in (False, True)]
        try:
            records = [
                future.result(LIMIT_S)
                for future in [executor.submit(work, i) for i in range(THREADS)]
            ]
        finally:
            over.set()
        told = [future.result(LIMIT_S) for future in waiting]
    under_way, not_drained = staging.arena().in_use()
    return {
        "records": records,
        "told to who waits for the stream": told[0],
        "told to who waits for the device": told[1],
        "leases left": under_way + not_drained,
    }


def failed_copies(trace: Path, threads: list[int]) -> list[dict[str, Any]]:
    """Return the copies of some threads that a fault made fail.

    Args:
        trace: What the simulator wrote.
        threads: The kernel's numbers of the threads.

    Returns:
        Lines of the trace.
    """
    failed = []
    with trace.open() as lines:
        for line in lines:
            if '"failed": true' in line:
                operation = json.loads(line)
                if operation["thread"] in threads:
                    failed.append(operation)
    return failed


def assign(records: list[Record], failed: list[dict[str, Any]]) -> dict[str, int]:
    """Compare who raised with whose copies failed.

    Args:
        records: Of all threads.
        failed: The copies of these threads that failed.

    Returns:
        Figures for the summary; all but the first three must be 0.
    """
    by_thread = {record.thread: record for record in records}
    hits: collections.Counter[tuple[int, int]] = collections.Counter()
    nobody = 0
    for copy in failed:
        record = by_thread[copy["thread"]]
        number = bisect_right(record.begins, copy["begin"]) - 1
        if number < 0 or copy["end"] > record.ends[number]:
            nobody += 1
        else:
            hits[copy["thread"], number] += 1
    raised = {
        (record.thread, number)
        for record in records
        for number, it_raised in enumerate(record.raised)
        if it_raised
    }
    return {
        "failed copies": len(failed),
        "transfers hit": len(hits),
        "transfers that raised": len(raised),
        "failed copies outside of any transfer": nobody,
        "hit and did not raise": len(set(hits) - raised),
        "raised and not hit": len(raised - set(hits)),
        "silent wrong results": sum(len(record.silent) for record in records),
    }


def main() -> int:
    """Run the campaign and print its summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transfers", type=int, default=2000)
    parser.add_argument("--faults", default=FAULTS)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    # Third Party
    import rbln_sim

    with tempfile.TemporaryDirectory(prefix="rbln-campaign-") as folder:
        trace = Path(folder) / "trace.jsonl"
        os.environ |= {
            "RBLN_SIM_FAULTS": options.faults,
            "RBLN_SIM_SEED": str(options.seed),
            "RBLN_SIM_TRACE": str(trace),
            "RBLN_SIM_STATE_DIR": folder,
        }
        # torch-rbln logs a stack for each failure, to stdout.
        stdout = os.dup(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        rbln_sim.activate()
        sys.path.append(str(Path(__file__).parents[1] / "support"))
        figures = run(options.transfers)
        records = figures.pop("records")
        failed = failed_copies(trace, [record.thread for record in records])
        summary = {"transfers": sum(len(record.ends) for record in records)}
        summary |= assign(records, failed) | figures
    os.write(stdout, (json.dumps(summary, indent=2) + "\n").encode())
    must_be_0 = [
        "failed copies outside of any transfer",
        "hit and did not raise",
        "raised and not hit",
        "silent wrong results",
        "leases left",
    ]
    return int(any(summary[name] for name in must_be_0))


if __name__ == "__main__":
    sys.exit(main())
