# SPDX-License-Identifier: Apache-2.0
"""How fast KV blocks move between the NPU and LMCache's chunks in host memory.

    python -m benchmarks.block_transfer             # what `make bench` measures
    python -m benchmarks.block_transfer --matrix    # everything, takes an hour

See ``benchmarks/README.md``.
"""

# Standard
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
import argparse
import sys
import time

# First Party
from benchmarks import _counting, _report, _runtime, _targets
from benchmarks._cases import Row, matrix, selection
from tests.support.serving.runtime import WANTED

ROOT = Path(__file__).resolve().parents[1]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.block_transfer",
        description=(__doc__ or "").splitlines()[0],
    )
    add = parser.add_argument
    add("--runtime", choices=WANTED, default="auto")
    add("--matrix", action="store_true", help="every combination")
    add("--only", help="cases whose name has this text", default="")
    add("--rounds", type=int, default=31, help="timed calls that count")
    add("--max-gib", type=float, default=10.0, help="leave out cases that take more")
    add("--torch-threads", type=int, default=1, help="of one torch operation")
    add("--check", action="store_true", help="end with 1 where a target is missed")
    add("--folder", type=Path, default=ROOT / "build" / "bench")
    add("--no-chart", action="store_true")
    parsed = parser.parse_args(arguments)
    if parsed.rounds < 1 or parsed.torch_threads < 1:
        parser.error("--rounds and --torch-threads must be positive")
    return parsed


def run(options: argparse.Namespace, runtime: str, simulated: bool) -> int:
    """Measure, print, write files and judge.

    Args:
        options: See :func:`parse_arguments`.
        runtime: Name of the runtime.
        simulated: Whether it is the simulator, whose copies can be counted.

    Returns:
        The exit code.
    """
    wanted = matrix() if options.matrix else selection()
    chosen = [case for case in wanted if options.only in str(case)]
    cases = [case for case in chosen if case.footprint <= options.max_gib * 2**30]
    too_large = [case for case in chosen if case not in cases]
    if not cases:
        print(
            f"no case of at most {options.max_gib:g} GiB has {options.only!r} in its "
            "name; see --max-gib and --only",
            file=sys.stderr,
        )
        return 2
    begin = time.monotonic()
    plain, slow = _counting.run(cases) if simulated else ({}, {})
    # Third Party
    import torch

    # Local
    from benchmarks._measure import measure
    from benchmarks._session import load_contenders

    torch.set_num_threads(options.torch_threads)
    operations = load_contenders()
    rows: list[Row] = []
    for case in cases:
        print(f"[{time.monotonic() - begin:5.1f} s] {case}", flush=True)
        rows += measure(case, operations, options.rounds)
    _counting.add(rows, plain, slow)
    checks = _targets.check_times(rows) + _targets.check_descriptors(rows)
    checks += _targets.check_modelled(rows)

    facts = _report.machine(runtime)
    title = f"{runtime}, {facts['cores']} cores"
    print(f"\n{title}, load {facts['load']:.2f}\n\n{_report.times_table(rows)}\n")
    for case in too_large:
        print(f"left out: {case} takes {case.footprint / 2**30:.1f} GiB")
    print(f"\n{_report.checks_table(checks)}")
    content = {
        "machine": facts,
        "rounds": options.rounds,
        "torch_threads": options.torch_threads,
        "rows": [asdict(row) for row in rows],
        "checks": [asdict(check) for check in checks],
        "left_out": [str(case) for case in too_large],
    }
    _report.write_json(options.folder / "block_transfer.json", content)
    print(f"\nwrote {options.folder / 'block_transfer.json'}")
    if not options.no_chart:
        chart = options.folder / "block_transfer.png"
        _report.draw(rows, chart, title)
        print(f"wrote {chart}")
    return int(options.check and not all(check.held for check in checks))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark.

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
