# SPDX-License-Identifier: Apache-2.0
"""Totals and a timeline of a trace that the simulated NPU wrote.

``RBLN_SIM_TRACE=FILE`` makes every process of the simulator append one JSON object per
operation to FILE. ``python -m rbln_sim.trace FILE`` prints what was copied and draws
the copies of each stream against the work of the host::

    {"pid": 71, "thread": 71, "kind": "d2h", "bytes": 4096, "descriptors": 1,
     "device": 0, "stream": 2, "via": "link", "begin": 1200, "end": 1950,
     "failed": false}

Times are nanoseconds of the machine's monotonic clock. ``stream`` is null for what runs
in the calling thread: synchronous copies, graphs and waits. ``thread`` is the thread
that called. ``via`` tells how a copy went: ``link``; ``host`` if it was served from
host memory and nothing crossed; ``hidden`` if residency made it inside a call that
asked for none. It is null for graphs and waits. ``failed`` tells whether a fault of
``RBLN_SIM_FAULTS`` made it fail.
"""

# Future
from __future__ import annotations

# Standard
import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Kinds that move bytes, and kinds during which the host waits or computes.
COPIES = ("d2h", "h2d", "d2d")
KINDS = (*COPIES, "graph", "wait")
#: Ways of a copy.
LINK, HOST, HIDDEN = "link", "host", "hidden"

_COLOURS = {
    "d2h": "tab:blue",
    "h2d": "tab:orange",
    "d2d": "tab:green",
    "graph": "tab:purple",
    "wait": "lightgrey",
    "host": "tab:red",
}


@dataclass(frozen=True)
class Operation:
    """One line of a trace."""

    pid: int
    thread: int
    kind: str
    bytes: int
    descriptors: int
    device: int
    stream: int | None
    via: str | None
    begin: int
    end: int
    failed: bool = False

    @property
    def label(self) -> str:
        """The kind, and the way of a copy that did not take the link as asked for."""
        return self.kind if self.via in (LINK, None) else f"{self.kind} {self.via}"

    @property
    def row(self) -> tuple[str, int, int]:
        """The timeline row that the operation belongs to: a stream or a thread."""
        if self.stream is None:
            return ("thread", self.pid, self.thread)
        return (f"rbln:{self.device} stream", self.pid, self.stream)


@dataclass(frozen=True)
class Total:
    """Sums over the operations of one kind.

    Attributes:
        operations: Number of operations.
        bytes: Bytes moved.
        descriptors: Contiguous pieces that a copy engine would be given.
        busy_ns: Time during which at least one of them ran.
    """

    operations: int
    bytes: int
    descriptors: int
    busy_ns: int


def read(path: Path) -> list[Operation]:
    """Read a trace.

    Args:
        path: The file that ``RBLN_SIM_TRACE`` named.

    Returns:
        Its operations, by their begin.

    Raises:
        ValueError: A line is not an operation; the message has its number.
    """
    operations = []
    # Bytes that are no text end in the error of their line.
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                operation = Operation(**json.loads(line))
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}:{number}: not an operation of a trace: {error}"
                ) from error
            operations.append(operation)
    return sorted(operations, key=lambda operation: operation.begin)


def covered(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join intervals that touch or overlap, in order."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def length(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the summed length of intervals that do not overlap."""
    return sum(end - begin for begin, end in intervals)


def common(
    left: Sequence[tuple[int, int]], right: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return where two lists of joined intervals overlap."""
    overlaps = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin = max(left[i][0], right[j][0])
        end = min(left[i][1], right[j][1])
        if begin < end:
            overlaps.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return overlaps


def host_work(operations: Sequence[Operation]) -> list[tuple[int, int]]:
    """Return when the host worked: between a thread's operations, not inside them.

    A thread's own time goes from its first operation to its last. Inside synchronous
    copies, graphs and waits it is the simulator's or nobody's.
    """
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for operation in operations:
        if operation.stream is None:
            threads[operation.pid, operation.thread].append(
                (operation.begin, operation.end)
            )
    gaps = []
    for intervals in threads.values():
        taken = covered(intervals)
        gaps += [
            (before[1], after[0])
            for before, after in zip(taken, taken[1:], strict=False)
        ]
    return covered(gap for gap in gaps if gap[0] < gap[1])


def totals(operations: Sequence[Operation]) -> dict[str, Total]:
    """Sum up a trace, by label."""
    chosen: dict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        chosen[operation.label].append(operation)
    in_order = sorted(chosen, key=lambda label: (KINDS.index(label.split()[0]), label))
    return {
        label: Total(
            operations=len(chosen[label]),
            bytes=sum(operation.bytes for operation in chosen[label]),
            descriptors=sum(operation.descriptors for operation in chosen[label]),
            busy_ns=length(covered((o.begin, o.end) for o in chosen[label])),
        )
        for label in in_order
    }


def report(operations: Sequence[Operation]) -> str:
    """Return a table of totals and how much of the copying the host worked through."""
    lines = [
        f"{'kind':10} {'operations':>10} {'descriptors':>11} {'MiB':>10} "
        f"{'busy ms':>9} {'GB/s':>7}"
    ]
    for kind, total in totals(operations).items():
        speed = f"{total.bytes / total.busy_ns:.2f}" if total.busy_ns else "-"
        lines.append(
            f"{kind:10} {total.operations:>10,} {total.descriptors:>11,} "
            f"{total.bytes / 2**20:>10,.2f} {total.busy_ns / 1e6:>9,.2f} {speed:>7}"
        )
    copying = covered((o.begin, o.end) for o in operations if o.stream is not None)
    shared = length(common(copying, host_work(operations)))
    if copying:
        lines.append(
            f"streams were busy for {length(copying) / 1e6:,.2f} ms, during "
            f"{100 * shared / max(1, length(copying)):.0f} % of which the host worked"
        )
    return "\n".join(lines)


def draw(operations: Sequence[Operation], path: Path) -> None:
    """Draw the timeline: a row per stream and per thread.

    Args:
        operations: What to draw, at least one.
        path: The PNG to write.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        # Third Party
        import matplotlib
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "the timeline needs matplotlib: pip install matplotlib"
        ) from error
    matplotlib.use("agg")
    # Third Party
    from matplotlib import pyplot

    start = min(operation.begin for operation in operations)
    rows = sorted({operation.row for operation in operations})
    figure, axes = pyplot.subplots(figsize=(14, 1.5 + 0.45 * len(rows)))
    shown = set()
    bars: dict[tuple[tuple[str, int, int], str], list[tuple[float, float]]]
    bars = defaultdict(list)
    for operation in operations:
        bars[operation.row, operation.kind].append((operation.begin, operation.end))
    for row in rows:
        if row[0] == "thread":
            own = [operation for operation in operations if operation.row == row]
            bars[row, "host"] = list(host_work(own))
    for (row, kind), intervals in bars.items():
        axes.broken_barh(
            [((b - start) / 1e6, max(e - b, 1) / 1e6) for b, e in intervals],
            (rows.index(row) - 0.4, 0.8),
            facecolors=_COLOURS[kind],
            label=None if kind in shown else kind,
        )
        shown.add(kind)
    axes.set_yticks(
        range(len(rows)), [f"{what} {number}, pid {pid}" for what, pid, number in rows]
    )
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.legend(loc="upper right", ncols=len(shown))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Arguments after the program's name; this process's by default.

    Returns:
        The exit code: 0, or 1 if the trace can't be read or drawn.
    """
    parser = argparse.ArgumentParser(prog="python -m rbln_sim.trace")
    parser.add_argument("file", type=Path, help="what RBLN_SIM_TRACE named")
    parser.add_argument(
        "--png", type=Path, help="the timeline to write (default: FILE.png)"
    )
    parsed = parser.parse_args(arguments)
    try:
        operations = read(parsed.file)
        if not operations:
            raise ValueError(f"{parsed.file} has no operations")
        print(report(operations))
        picture = parsed.png or Path(f"{parsed.file}.png")
        draw(operations, picture)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"rbln_sim.trace: {error}", file=sys.stderr)
        return 1
    print(f"timeline: {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
