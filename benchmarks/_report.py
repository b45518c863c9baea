# SPDX-License-Identifier: Apache-2.0
"""Tables, JSON and the chart of the benchmarks."""

# Standard
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
import json
import os
import platform
import re

# First Party
from benchmarks._cases import FLOOR, GENERIC, OURS, STOCK, Row
from benchmarks._targets import Check

_CHARTED = {STOCK: "tab:grey", GENERIC: "tab:olive", OURS: "tab:blue"}
_NUMERIC = re.compile(r"-|n/a|[\d.,]+")
_PACKAGES = ("torch", "torch-rbln", "vllm-rbln", "lmcache")


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table of cells; columns of numbers are right-aligned."""
    columns = list(zip(header, *lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(_NUMERIC.fullmatch(cell) for cell in c[1:]) for c in columns]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(cells, widths, right, strict=True)
        ).rstrip()
        for cells in (header, ["-" * width for width in widths], *lines)
    )


def times_table(rows: Sequence[Row]) -> str:
    """Return the table of times and ratios.

    ``sub`` are copy operations of one call, ``desc`` their host descriptors.
    """
    header = ["case", "layout", "direction", "MB", "floor ms", "stock/floor"]
    header += ["generic/floor", "ours/floor", "stock/ours", "GB/s", "sub", "desc"]
    header += ["stock sub", "stock desc"]
    pairs = [(STOCK, FLOOR), (GENERIC, FLOOR), (OURS, FLOOR), (STOCK, OURS)]
    lines = []
    for row in rows:
        moved = row.case.bytes * row.case.threads
        cells = [str(row.case), row.layout, row.direction, f"{moved / 1e6:.1f}"]
        cells.append(f"{row.seconds[FLOOR] * 1e3:.2f}")
        ratios = [row.ratio(*pair) for pair in pairs]
        cells += ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        cells.append(f"{moved / row.seconds[OURS] / 1e9:.2f}")
        for name in (OURS, STOCK):
            copies = row.copies.get(name)
            cells.append(str(copies.submissions) if copies else "n/a")
            cells.append(str(copies.host_descriptors) if copies else "n/a")
        lines.append(cells)
    return table(header, lines)


def checks_table(checks: Sequence[Check]) -> str:
    """Return the missed targets, then a count of all by target."""
    parts = []
    missed = [[c.target, c.what, c.wanted, c.got] for c in checks if not c.held]
    if missed:
        parts.append(table(["MISSED target", "of", "wanted", "got"], missed))
    held: dict[str, list[bool]] = {}
    for check in checks:
        held.setdefault(check.target, []).append(check.held)
    counts = [[name, f"{sum(own)} of {len(own)}"] for name, own in held.items()]
    parts.append(table(["target", "met"], counts))
    return "\n\n".join(parts)


def machine(runtime: str) -> dict[str, Any]:
    """Return what the numbers depend on."""
    installed = {found.name: found.version for found in metadata.distributions()}
    return {
        "runtime": runtime,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "machine": platform.platform(),
        "versions": {package: installed.get(package) for package in _PACKAGES},
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw each contender's time over the floor's into a PNG, a group of bars per row.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        # Third Party
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "the chart needs matplotlib: pip install matplotlib, or pass --no-chart"
        ) from error
    figure = Figure(figsize=(11, 1.5 + 0.34 * len(rows)), layout="tight")
    axes = figure.subplots()
    for index, (name, colour) in enumerate(_CHARTED.items()):
        places = [place + (index - 1) * 0.27 for place in range(len(rows))]
        ratios = [row.ratio(name, FLOOR) or 0 for row in rows]
        axes.barh(places, ratios, 0.27, color=colour, label=name)
    axes.set_yticks(range(len(rows)), list(map(str, rows)), fontsize=8)
    axes.axvline(1, color="black", linewidth=1)
    # Generic may be a hundred times as slow.
    longest = max(row.ratio(name, FLOOR) or 1 for row in rows for name in (STOCK, OURS))
    axes.set_xlim(0, 1.1 * longest)
    axes.invert_yaxis()
    axes.set_xlabel("time over that of one contiguous copy (the line)")
    axes.set_title(title)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
