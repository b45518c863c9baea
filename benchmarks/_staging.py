# SPDX-License-Identifier: Apache-2.0
"""How much memory transfers take for staging, from the process's own memory."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping
from pathlib import Path
from typing import Any
import re

# Third Party
import torch

# First Party
from benchmarks._cases import GATHER, SCATTER, Case
from benchmarks._samples import FLOOR, OURS, STOCK
from benchmarks._session import Session

_STATUS = Path("/proc/self/status")


def _mib(field: str) -> float:
    found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert found is not None, field
    return int(found[1]) / 1024


def _device_mib() -> float:
    """Device memory in use now; a simulated device has it in this process."""
    return torch.rbln.memory_allocated(0) / 2**20  # type: ignore[attr-defined]


def measure_staging(case: Case, operations: Mapping[str, Any]) -> dict[str, float]:
    """Return the peak growth of the process's memory while it transfers.

    Everything else that a call needs is in place before: chunks and paged caches, and
    threads with their stacks.

    Args:
        case: What every thread moves.
        operations: Operations by contender.

    Returns:
        MiB by contender and threads, as ``ours, 8 threads``.
    """
    session = Session(case, operations)
    staging = {}
    try:
        for contender in (OURS, STOCK):
            layout = case.geometry.layouts[-1]
            session.run(FLOOR, "", GATHER)
            Path("/proc/self/clear_refs").write_text("5")
            before, device = _mib("VmRSS"), _device_mib()
            for direction in (GATHER, SCATTER, GATHER):
                session.run(contender, layout, direction)
            grown = _mib("VmHWM") - before - (_device_mib() - device)
            staging[f"{contender}, {case.threads} threads"] = round(grown, 1)
    finally:
        session.close()
    return staging
