# SPDX-License-Identifier: Apache-2.0
"""Copies of a call and what they cost on hardware.

They are traced in processes of their own: a trace costs time, so what is timed is not
traced.
"""

# Standard
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
import json
import multiprocessing
import os
import tempfile

# First Party
from benchmarks import _runtime
from benchmarks._cases import FLOOR, GATHER, GENERIC, OURS, SCATTER, STOCK
from benchmarks._cases import Case, Copies, Row

#: Figures of the hardware: GB/s of registered and of pageable host memory and inside
#: the device, and the time of one host descriptor.
REGISTERED_GBPS = 58.0
PAGEABLE_GBPS = 14.0
DEVICE_GBPS = 240.0
DESCRIPTOR_US = 17.0
#: The same as settings of the simulator, for a backend that measures.
_HARDWARE = {
    "RBLN_SIM_GBPS": f"{REGISTERED_GBPS:g}",
    "RBLN_SIM_PAGEABLE_GBPS": f"{PAGEABLE_GBPS:g}",
    "RBLN_SIM_D2D_GBPS": f"{DEVICE_GBPS:g}",
    "RBLN_SIM_DESCRIPTOR_US": f"{DESCRIPTOR_US:g}",
}
#: By case, contender, layout and direction.
Counts = dict[tuple[Case, str, str, str], Copies]


def copies_of(operations: Sequence[dict[str, Any]]) -> Copies:
    """Sum up the traced operations of one call, see ``rbln_sim.trace``."""
    # What is served from host memory crosses no link.
    copies = [op for op in operations if "2" in op["kind"] and op["via"] != "host"]
    host = sum(op["descriptors"] for op in copies if op["kind"] != "d2d")
    return Copies(len(copies), host, modelled_seconds(copies))


def modelled_seconds(copies: Sequence[dict[str, Any]]) -> float:
    """Return when the last copy would end if the host took no time.

    Copies of a stream follow each other, copies on a link too, and a synchronous copy
    waits for all before it. Host descriptors have a fixed cost; copies inside the
    device go by bytes alone. An asynchronous copy counts as one of registered memory.
    """
    streams: dict[Any, float] = defaultdict(float)
    links: dict[tuple[Any, Any], float] = defaultdict(float)
    host = 0.0
    for copy in sorted(copies, key=lambda copy: copy["begin"]):
        link, stream = (copy["device"], copy["kind"]), copy["stream"]
        inside, synchronous = copy["kind"] == "d2d", stream is None
        ready = max(streams.values(), default=0) if synchronous else streams[stream]
        speed = PAGEABLE_GBPS if synchronous else REGISTERED_GBPS
        took = copy["bytes"] / (DEVICE_GBPS if inside else speed) / 1e9
        took += 0 if inside else copy["descriptors"] * DESCRIPTOR_US / 1e6
        links[link] = streams[stream] = max(host, ready, links[link]) + took
        host = streams[stream] if synchronous else host
    return max(streams.values(), default=0.0)


def _count(cases: Sequence[Case], costs: dict[str, str]) -> Counts:
    """Trace one call each, but for the generic operations; runs in its own process."""
    with tempfile.TemporaryDirectory(prefix="rbln-bench-") as folder:
        trace = Path(folder, "trace.jsonl")
        trace.touch()
        state = str(Path(folder, "npu"))
        os.environ |= {"RBLN_SIM_TRACE": str(trace), "RBLN_SIM_STATE_DIR": state}
        os.environ |= costs
        _runtime.use("sim")
        # Local
        from benchmarks._session import Session, load_contenders

        operations, counts = load_contenders(), {}
        for number, case in enumerate(cases):
            session = Session(case, operations, filled=False)
            if number == 0:
                # The backend measures what copies cost in the first large transfer.
                for layout in case.geometry.layouts:
                    session.call(OURS, layout, GATHER, 0)
            for direction in (GATHER, SCATTER):
                for contender, layout in session.contenders():
                    if contender != GENERIC:
                        before = trace.stat().st_size
                        session.call(contender, layout, direction, 0)
                        with trace.open() as lines:
                            lines.seek(before)
                            copies = copies_of([json.loads(line) for line in lines])
                        counts[case, contender, layout, direction] = copies
            session.close()
        return counts


def run(cases: Sequence[Case]) -> tuple[Counts, Counts]:
    """Count copies; nothing is timed, so both at once.

    Returns:
        Copies, and copies where the simulator is as slow as the hardware: of cases with
        one thread and scattered ids.
    """
    context = multiprocessing.get_context("spawn")
    costed = [case for case in cases if case.threads == 1 and not case.adjacent]
    with ProcessPoolExecutor(2, context) as pool:
        plain = pool.submit(_count, cases, {})
        slow = pool.submit(_count, costed, _HARDWARE)
        return plain.result(), slow.result()


def add(rows: Sequence[Row], plain: Counts, slow: Counts) -> None:
    """Put counts into the rows that they belong to."""
    for row in rows:
        layouts = {FLOOR: "", STOCK: row.case.geometry.layouts[-1], OURS: row.layout}
        for name, layout in layouts.items():
            key = (row.case, name, layout, row.direction)
            if key in plain:
                row.copies[name] = plain[key]
        row.hardware = slow.get((row.case, OURS, row.layout, row.direction))
