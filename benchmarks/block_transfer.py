# SPDX-License-Identifier: Apache-2.0
"""How fast KV blocks move between the NPU and LMCache's chunks in host memory.

    python -m benchmarks.block_transfer             # what `make bench` measures
    python -m benchmarks.block_transfer --matrix    # everything, takes an hour

Four contenders take turns in one process, and medians are compared: *floor*, one
contiguous asynchronous copy of the same bytes into or out of pinned memory; *stock*,
LMCache 0.5.6's own RBLN operations; *generic*, LMCache's torch baseline; and *ours*.
Before a case is timed, every byte of each contender is compared with plain indexing.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
import argparse
import sys
import time

# First Party
from benchmarks import _counting, _report, _runtime, _targets
from benchmarks._cases import Case, Row, matrix, selection
from examples.rbln_demo.runtime import WANTED

ROOT = Path(__file__).resolve().parents[1]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.block_transfer",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("--runtime", choices=WANTED, default="auto")
    parser.add_argument("--matrix", action="store_true", help="every combination")
    parser.add_argument("--only", help="cases whose name has this text", default="")
    parser.add_argument("--rounds", type=int, default=31, help="timed calls that count")
    parser.add_argument(
        "--max-gib", type=float, default=10.0, help="leave out cases that take more"
    )
    parser.add_argument(
        "--torch-threads",
        type=int,
        default=1,
        help="threads of one torch operation; the targets are for 1",
    )
    parser.add_argument(
        "--check", action="store_true", help="end with 1 where a target is missed"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--no-chart", action="store_true")
    parsed = parser.parse_args(arguments)
    if parsed.rounds < 1 or parsed.torch_threads < 1:
        parser.error("--rounds and --torch-threads must be positive")
    return parsed


def choose(options: argparse.Namespace) -> tuple[list[Case], list[Case]]:
    """Return the cases to measure, and those that take too much memory."""
    wanted = matrix() if options.matrix else selection()
    cases = [case for case in wanted if options.only in str(case)]
    limit = options.max_gib * 2**30
    return (
        [case for case in cases if case.footprint <= limit],
        [case for case in cases if case.footprint > limit],
    )


def costed(cases: Sequence[Case]) -> list[Case]:
    """Return the cases that the cost model is asked about: one thread, any ids."""
    return [case for case in cases if case.threads == 1 and not case.adjacent]


def run(options: argparse.Namespace, runtime: str, simulated: bool) -> int:
    """Measure, print, write files and judge.

    Args:
        options: See :func:`parse_arguments`.
        runtime: Name of the runtime.
        simulated: Whether it is the simulator, whose copies can be counted.

    Returns:
        The exit code.
    """
    cases, too_large = choose(options)
    if not cases:
        print(f"no case has {options.only!r} in its name", file=sys.stderr)
        return 2
    begin = time.monotonic()
    checks: list[_targets.Check] = []
    counts: dict[tuple[str, str, str, str], _counting.Copies] = {}
    modelled = dict(counts)
    staging: dict[str, float] = {}
    if simulated:
        # Nothing is timed here, so both at once.
        with ThreadPoolExecutor(2) as pool:
            counting = pool.submit(_counting.run, cases, staging=(1, 8))
            costing = pool.submit(_counting.run, costed(cases), hardware_costs=True)
            counts, staging = counting.result()
            modelled, _ = costing.result()
        print(f"[{time.monotonic() - begin:5.1f} s] copies counted", flush=True)
    # Third Party
    import torch

    # Local
    from benchmarks._measure import Measurer
    from benchmarks._session import load_contenders

    torch.set_num_threads(options.torch_threads)
    measurer = Measurer(load_contenders(), options.rounds)
    rows: list[Row] = []
    for case in cases:
        print(f"[{time.monotonic() - begin:5.1f} s] {case}", flush=True)
        rows += measurer.measure(case)
    _counting.add(rows, counts)
    checks += _targets.check_times(rows)
    of_all = [replace(row, seconds=row.seconds_of_all) for row in rows]
    held_of_all = sum(check.held for check in _targets.check_times(of_all))
    timed = len(checks)
    checks += _targets.check_descriptors(rows)
    checks += _targets.check_staging(staging)
    modelled_rows = [Row(r.case, r.layout, r.direction, {}, {}, {}) for r in rows]
    _counting.add(modelled_rows, modelled)
    checks += _targets.check_modelled(modelled_rows)

    facts = _report.machine(runtime)
    title = f"{runtime}, medians of about {options.rounds}, {facts['cores']} cores"
    print(f"\n{title}, load {facts['load']:.2f}\n\n{_report.times_table(rows)}\n")
    for note in _report.generic_notes(rows):
        print(f"not measured: {note}")
    for case in too_large:
        print(f"left out: {case} takes {case.footprint / 2**30:.1f} GiB")
    for what, mib in staging.items():
        print(f"peak staging: {what}: {mib:.1f} MiB")
    print(f"\n{_report.checks_table(checks)}")
    if any(row.far for row in rows):
        held = sum(check.held for check in checks[:timed])
        print(
            f"\nof {timed} checks of times {held} hold; {held_of_all} would with all "
            "calls whose CPUs were far from each other"
        )
    content = {
        "machine": facts,
        "rounds": options.rounds,
        "torch_threads": options.torch_threads,
        "rows": [row.as_json() for row in rows],
        "hardware_costs": [row.as_json() for row in modelled_rows if row.counts],
        "staging_mib": staging,
        "checks": [asdict(check) for check in checks],
        "left_out": [str(case) for case in too_large],
    }
    _report.write_json(options.folder / "block_transfer.json", content)
    print(f"\nwrote {options.folder / 'block_transfer.json'}")
    if not options.no_chart:
        chart = options.folder / "block_transfer.png"
        _report.draw(rows, chart, title)
        print(f"wrote {chart}")
    missed = [check for check in checks if not check.held]
    return 1 if options.check and missed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Args:
        arguments: Arguments after the program's name; this process's by default.

    Returns:
        The exit code: 0; 1 if a target is missed and ``--check`` is given, or nothing
        can be measured; 2 for wrong use.
    """
    options = parse_arguments(arguments)
    try:
        runtime = _runtime.use(options.runtime)
        return run(options, runtime.name, runtime.simulated)
    except RuntimeError as error:
        print(f"block_transfer: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
