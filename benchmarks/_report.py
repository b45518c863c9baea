# SPDX-License-Identifier: Apache-2.0
"""Tables, JSON and the chart of the block transfer benchmark."""

# Future
from __future__ import annotations

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
from benchmarks._cases import Row
from benchmarks._targets import Check

_CHARTED = {"stock": "tab:grey", "generic": "tab:olive", "ours": "tab:blue"}
_NUMERIC = re.compile(r"-|n/a|[\d.,]+(% in|%)?")
_PACKAGES = ("torch", "torch-rbln", "vllm-rbln", "lmcache")


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table; columns of numbers are right-aligned.

    Args:
        header: Titles of the columns.
        lines: Cells of each line.
    """
    columns = list(zip(header, *lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(_NUMERIC.fullmatch(cell) for cell in c[1:]) for c in columns]

    def line(cells: Sequence[str]) -> str:
        placed = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        return "  ".join(placed).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(header), rule, *map(line, lines)])


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def times_table(rows: Sequence[Row]) -> str:
    """Return the table of median times and ratios.

    ``sub`` are copy operations of one call, ``desc`` their host descriptors, ``far`` is
    the share of calls with CPUs far from each other; they count where it says ``in``.
    """
    header = ["case", "layout", "direction", "MB", "floor ms", "stock/floor"]
    header += ["generic/floor", "ours/floor", "stock/ours", "GB/s", "sub", "desc"]
    header += ["stock sub", "stock desc", "far"]
    lines = []
    for row in rows:
        moved = row.case.bytes * row.case.threads
        ours = row.seconds.get("ours")
        floor = row.seconds.get("floor")
        cells = [str(row.case), row.layout, row.direction, f"{moved / 1e6:.1f}"]
        cells += [
            _number(floor and floor * 1e3),
            _number(row.ratio("stock", "floor")),
            _number(row.ratio("generic", "floor")),
            _number(row.ratio("ours", "floor")),
            _number(row.ratio("stock", "ours")),
            _number(ours and moved / ours / 1e9),
        ]
        for name in ("ours", "stock"):
            copies = row.counts.get(name)
            cells.append(str(copies.submissions) if copies else "n/a")
            cells.append(str(copies.host_descriptors) if copies else "n/a")
        count = " in" if row.far and row.all_count else ""
        lines.append([*cells, f"{row.far:.0%}{count}"])
    return table(header, lines)


def generic_notes(rows: Sequence[Row]) -> list[str]:
    """Return why the generic operations were not measured, each reason once."""
    notes: dict[str, None] = {}
    for row in rows:
        for name, reason in row.failures.items():
            notes[f"{name}, {row.layout} {row.direction}: {reason}"] = None
    return list(notes)


def checks_table(checks: Sequence[Check]) -> str:
    """Return the missed targets, then a count of all by target."""
    missed = [check for check in checks if not check.held]
    parts = []
    if missed:
        header = ["MISSED target", "of", "wanted", "got"]
        lines = [[c.target, c.what, c.wanted, c.got] for c in missed]
        parts.append(table(header, lines))
    totals: dict[str, list[int]] = {}
    for check in checks:
        total = totals.setdefault(check.target, [0, 0])
        total[0] += check.held
        total[1] += 1
    counts = [[name, f"{held} of {total}"] for name, (held, total) in totals.items()]
    parts.append(table(["target", "met"], counts))
    return "\n\n".join(parts)


def machine(runtime: str) -> dict[str, Any]:
    """Return what the numbers depend on."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "runtime": runtime,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "machine": platform.platform(),
        "versions": versions,
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw each contender's time over the floor's, a group of bars per row.

    Args:
        rows: What to draw, at least one.
        path: The PNG to write.
        title: Title of the chart.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        # Third Party
        import matplotlib
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "the chart needs matplotlib: pip install matplotlib, or pass --no-chart"
        ) from error
    matplotlib.use("agg")
    # Third Party
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 1.5 + 0.34 * len(rows)))
    height = 0.8 / len(_CHARTED)
    for index, (name, colour) in enumerate(_CHARTED.items()):
        known = [
            (position + (index - 1) * height, ratio)
            for position, row in enumerate(rows)
            if (ratio := row.ratio(name, "floor")) is not None
        ]
        axes.barh(
            [place for place, _ in known],
            [ratio for _, ratio in known],
            height,
            color=colour,
            label=name,
        )
    labels = [f"{row.case} {row.layout} {row.direction}" for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.axvline(1, color="black", linewidth=1)
    # Generic may be a hundred times as slow.
    longest = [
        row.ratio(name, "floor") or 1 for row in rows for name in ("stock", "ours")
    ]
    axes.set_xlim(0, 1.1 * max(longest))
    axes.invert_yaxis()
    axes.set_xlabel("median time over that of one contiguous copy (the line)")
    axes.set_title(title)
    axes.legend(loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
