# SPDX-License-Identifier: Apache-2.0
"""What LMCache's server makes of the transfers: throughput, engine time, first token.

    python -m benchmarks.mp_server            # everything, takes some minutes
    python -m benchmarks.mp_server --quick    # a smoke test

Part ``transfer`` drives LMCache's own worker side against a real ``lmcache server``, in
one process per worker and NPU: GB/s stored and restored by all of them, and the time of
a store and of a restore on the engine's thread. Part ``ttft`` sends prompts through
``vllm serve`` with a tiny model, once to compute and once to restore them. Part
``gaps`` lets one request decode there while others restore, on the engine's thread and
beside the engine. All restored bytes and all answers are compared.
"""

# Standard
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
import argparse
import itertools
import signal
import sys

# First Party
from benchmarks import _gaps, _mp_transfer, _report, _targets, _ttft
from benchmarks._mp_worker import Load
from tests.support.serving.client import RequestFailedError
from tests.support.serving.processes import ServerFailedError
from tests.support.serving.runtime import WANTED, Runtime, find_runtime

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("transfer", "ttft", "gaps")
TRANSPORTS = ("shm", "pickle")
_LENGTHS = (257, 513, 1025, 2049, 4097)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mp_server",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("--runtime", choices=WANTED, default="auto")
    parser.add_argument("--quick", action="store_true", help="one of each, small")
    parser.add_argument("--part", choices=PARTS, nargs="*", default=list(PARTS))
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument(
        "--transport", choices=TRANSPORTS, nargs="*", default=list(TRANSPORTS)
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--lengths", type=int, nargs="*", default=list(_LENGTHS), help="of prompts"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="end with 1 where a transfer holds the engine's thread for too long",
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    options = parser.parse_args(arguments)
    # vLLM takes a relative path of the model for the name of one on a hub.
    options.folder = options.folder.resolve()
    if options.quick:
        options.workers, options.rounds = options.workers[:1], 1
        options.lengths = options.lengths[:2]
    if options.rounds < 1 or min(options.workers, default=1) < 1:
        parser.error("--rounds and --workers must be positive")
    if min(options.lengths, default=_LENGTHS[0]) <= _ttft.BLOCK_SIZE:
        parser.error(f"--lengths must be more than {_ttft.BLOCK_SIZE} tokens")
    return options


def load_of(options: argparse.Namespace) -> Load:
    """Return what each worker does."""
    blocks, requests = (1, 2) if options.quick else (4, 4)
    return Load("Qwen3-1.7B", 256, blocks, requests, port=0, worker=0)


def transfer_table(transfers: Sequence[_mp_transfer.Transfer]) -> str:
    """Return the table of throughput and engine time."""
    header = ["transport", "workers", "MB/request", "stored GB/s", "restored GB/s"]
    header += ["store ms on engine", "longest", "restore ms on engine", "longest"]
    lines = [
        [t.transport, str(t.workers), f"{t.request_bytes / 1e6:.1f}"]
        + [f"{value:.2f}" for value in (t.stored_gb_per_s, t.restored_gb_per_s)]
        + [f"{ms:.2f}" for ms in (t.store_ms, t.store_max_ms)]
        + [f"{ms:.2f}" for ms in (t.restore_ms, t.restore_max_ms)]
        for t in transfers
    ]
    return _report.table(header, lines)


def gaps_table(gaps: Sequence[_gaps.Gaps]) -> str:
    """Return the table of times between tokens."""
    header = ["restores", "MB each", "number", "gap ms", "95 %", "longest"]
    lines = [
        [g.restores, f"{g.restored_bytes / 1e6:.1f}", str(g.count)]
        + [f"{ms:.1f}" for ms in (g.median_ms, g.p95_ms, g.longest_ms)]
        for g in gaps
    ]
    return _report.table(header, lines)


def ttft_table(points: Sequence[_ttft.FirstToken]) -> str:
    """Return the table of times to first token, with the break-even length."""
    header = ["prompt tokens", "restored", "TTFT cold ms", "TTFT warm ms", "cold/warm"]
    lines = [
        [str(p.tokens), str(p.restored_tokens)]
        + [f"{ms:.0f}" for ms in (p.cold_ms, p.warm_ms)]
        + [f"{p.cold_ms / p.warm_ms:.2f}"]
        for p in points
    ]
    length = _ttft.break_even(points)
    verdict = (
        f"restoring is faster from {length} tokens on, of the lengths measured"
        if length is not None
        else "restoring is not faster at the longest prompt measured"
    )
    return f"{_report.table(header, lines)}\n{verdict}"


def measure_transfers(
    options: argparse.Namespace, runtime: Runtime, folder: Path
) -> list[_mp_transfer.Transfer]:
    """Measure every transport with every number of workers.

    Raises:
        RuntimeError: A worker failed. With several workers on real NPUs that is said
            and left out, since there may be fewer NPUs.
    """
    load = load_of(options)
    transfers = []
    for transport, workers in itertools.product(options.transport, options.workers):
        print(f"{transport}, {workers} workers", flush=True)
        try:
            transfers.append(
                _mp_transfer.measure(
                    runtime, transport, workers, load, options.rounds, folder
                )
            )
        except RuntimeError as error:
            if runtime.simulated or workers == 1:
                raise
            print(f"left out: {error}", flush=True)
    return transfers


def run(options: argparse.Namespace, runtime: Runtime) -> int:
    """Measure, print, write the JSON file and judge.

    Returns:
        The exit code.
    """
    transfers: list[_mp_transfer.Transfer] = []
    points: list[_ttft.FirstToken] = []
    gaps: list[_gaps.Gaps] = []
    folder = options.folder / "mp_server"
    if "transfer" in options.part:
        transfers = measure_transfers(options, runtime, folder)
    if "ttft" in options.part:
        print("time to first token", flush=True)
        prompts = 1 if options.quick else 3
        points = _ttft.measure(runtime, options.lengths, prompts, folder)
    if "gaps" in options.part:
        print("gaps between tokens", flush=True)
        blocks, tokens = (2, 24) if options.quick else (14, 200)
        gaps = _gaps.measure(runtime, blocks, tokens, folder)
    facts = _report.machine(runtime.name)
    print(f"\n{runtime.name}, medians of {options.rounds}, {facts['cores']} cores")
    if transfers:
        print(f"\n{transfer_table(transfers)}")
    if points:
        print(f"\n{ttft_table(points)}")
    if gaps:
        print(f"\n{gaps_table(gaps)}")
    names = [f"{t.transport}, {t.workers} workers" for t in transfers]
    checks = _targets.check_engine_time(
        dict(zip(names, (t.store_ms for t in transfers), strict=True)),
        dict(zip(names, (t.restore_ms for t in transfers), strict=True)),
    )
    if checks:
        print(f"\n{_report.checks_table(checks)}")
    content = {
        "machine": facts,
        "transfers": [asdict(transfer) for transfer in transfers],
        "ttft": [asdict(point) for point in points],
        "gaps": [asdict(gap) for gap in gaps],
        "restoring_is_faster_from_tokens": _ttft.break_even(points),
        "checks": [asdict(check) for check in checks],
    }
    _report.write_json(options.folder / "mp_server.json", content)
    print(f"\nwrote {options.folder / 'mp_server.json'}")
    missed = [check for check in checks if not check.held]
    return 1 if options.check and missed else 0


def _end_on_signal(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Args:
        arguments: Arguments after the program's name; this process's by default.

    Returns:
        The exit code: 0; 1 if something failed, or a target is missed and ``--check``
        is given.
    """
    options = parse_arguments(arguments)
    # SIGTERM must unwind like ^C, or servers and workers would outlive this.
    before = signal.signal(signal.SIGTERM, _end_on_signal)
    try:
        return run(options, find_runtime(wanted=options.runtime))
    except (RuntimeError, RequestFailedError, ServerFailedError, OSError) as error:
        print(f"mp_server: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
