# SPDX-License-Identifier: Apache-2.0
"""Counts copies and staging memory in a simulator process of its own.

A trace costs time, so what is timed is not traced. ``python -m benchmarks._counting
TASK`` reads ``{"cases": [...], "staging": [threads, ...], "out": FILE}``; `run`
starts it. A real NPU has no trace.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
import json
import os
import subprocess
import sys
import tempfile

# First Party
from benchmarks import _runtime
from benchmarks._cases import DIRECTIONS, MODELS, Case, Copies, Model, Row
from benchmarks._copies import SIMULATOR_SETTINGS, count
from benchmarks._samples import GENERIC, OURS

ROOT = Path(__file__).resolve().parents[1]
#: Staging is measured while each thread moves this many bytes or more.
_STAGING_CASE = ("Qwen3-1.7B", 256, 2, 2)


def run(
    cases: Sequence[Case], staging: Sequence[int] = (), hardware_costs: bool = False
) -> tuple[dict[tuple[str, str, str, str], Copies], dict[str, float]]:
    """Count copies, and measure staging, in a process of its own.

    Args:
        cases: What to count.
        staging: Numbers of threads to measure staging with.
        hardware_costs: Whether the simulator is to be as slow as the hardware.

    Returns:
        Copies by case, contender, layout and direction, and MiB of staging by
        contender and threads.

    Raises:
        RuntimeError: The process failed; its last lines are in the message.
    """
    with tempfile.TemporaryDirectory(prefix="rbln-bench-") as folder:
        task = Path(folder, "task.json")
        out = Path(folder, "out.json")
        used = {case.model for case in cases}
        task.write_text(
            json.dumps(
                {
                    "models": [asdict(MODELS[name]) for name in sorted(used)],
                    "cases": [asdict(case) for case in cases],
                    "staging": list(staging),
                    "out": str(out),
                }
            )
        )
        environment = {
            **os.environ,
            **(SIMULATOR_SETTINGS if hardware_costs else {}),
            "RBLN_SIM_TRACE": str(Path(folder, "trace.jsonl")),
            "RBLN_SIM_STATE_DIR": str(Path(folder, "npu")),
        }
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks._counting", str(task)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            # What the runtime says of its own end is not why.
            told = [x for x in done.stdout.splitlines() if "rbln_free skipped" not in x]
            end = "\n".join(told[-15:])
            raise RuntimeError(f"counting copies failed:\n{end}")
        result = json.loads(out.read_text())
    counts = {
        (case, contender, layout, direction): Copies(**copies)
        for (case, contender, layout, direction), copies in result["counts"]
    }
    return counts, result["staging"]


def add(rows: Sequence[Row], counts: dict[tuple[str, str, str, str], Copies]) -> None:
    """Put counts into the rows that they belong to."""
    for row in rows:
        for (case, contender, layout, direction), copies in counts.items():
            same = case == str(row.case) and direction == row.direction
            if same and (layout == row.layout or contender in ("floor", "stock")):
                row.counts[contender] = copies


def _main(path: str) -> None:
    task = json.loads(Path(path).read_text())
    _runtime.use("sim")
    # Third Party
    import torch

    # Local
    from benchmarks._session import Session, load_contenders
    from benchmarks._staging import measure_staging

    torch.set_num_threads(1)
    MODELS.update({model["name"]: Model(**model) for model in task["models"]})
    operations = load_contenders()
    trace = Path(os.environ["RBLN_SIM_TRACE"])
    trace.touch()
    # First, while no pool is there yet.
    staging = {}
    for threads in task["staging"]:
        case = Case(*_STAGING_CASE, threads=threads)
        staging.update(measure_staging(case, operations))
    counts: list[tuple[tuple[str, ...], dict[str, Any]]] = []
    for number, fields in enumerate(task["cases"]):
        case = Case(**fields)
        session = Session(case, operations, filled=False)
        if number == 0:
            # The backend measures what copies cost in the first large transfer.
            for layout in case.geometry.layouts:
                session.call(OURS, layout, DIRECTIONS[0], 0)
        for direction in DIRECTIONS:
            for contender, layout in session.contenders():
                if contender == GENERIC:
                    continue
                before = trace.stat().st_size
                session.call(contender, layout, direction, 0)
                with trace.open() as lines:
                    lines.seek(before)
                    copies = count([json.loads(line) for line in lines])
                key = (str(case), contender, layout, direction)
                counts.append((key, asdict(copies)))
        session.close()
    Path(task["out"]).write_text(json.dumps({"counts": counts, "staging": staging}))


if __name__ == "__main__":
    _main(sys.argv[1])
