# SPDX-License-Identifier: Apache-2.0
"""Stores and restores of several workers through one LMCache server."""

# Standard
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
import json
import os
import statistics
import subprocess
import sys
import threading

# First Party
from benchmarks._cases import Case
from benchmarks._mp_worker import MARK, Load
from tests.support.serving.runtime import Runtime, own_machine, serving_environment
from tests.support.serving.servers import CacheServer, CacheServerConfig

ROOT = Path(__file__).resolve().parents[1]
_START_S = 300.0
_ANSWER_S = 300.0


@dataclass(frozen=True)
class Transfer:
    """Medians over the rounds of one transport and number of workers.

    Attributes:
        transport: ``shm`` or ``pickle``.
        workers: Number of workers, each with its own NPU.
        request_bytes: Bytes of a request.
        stored_gb_per_s: Bytes of all workers over the time from the first begin to
            the last end.
        restored_gb_per_s: The same for restores.
        store_ms: Time on the engine's thread per store.
        store_max_ms: The longest of them.
        restore_ms: Time on the engine's thread per restore.
        restore_max_ms: The longest of them.
    """

    transport: str
    workers: int
    request_bytes: int
    stored_gb_per_s: float
    restored_gb_per_s: float
    store_ms: float
    store_max_ms: float
    restore_ms: float
    restore_max_ms: float


class _WorkerProcess:
    """One worker, its commands on stdin and its answers on stdout."""

    def __init__(self, load: Load, environment: dict[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks._mp_worker",
                    json.dumps(asdict(load)),
                ],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def send(self, command: str) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the answer to a command; the first is to its start.

        Raises:
            RuntimeError: It died or took too long.
        """
        assert self._process.stdout is not None
        watchdog = threading.Timer(timeout_s, self._process.kill)
        watchdog.start()
        try:
            # The runtime may print lines of its own.
            for line in self._process.stdout:
                if line.startswith(MARK):
                    answer = json.loads(line.removeprefix(MARK))
                    assert isinstance(answer, dict)
                    return answer
        finally:
            watchdog.cancel()
        end = "\n".join(self._log.read_text(errors="replace").splitlines()[-5:])
        raise RuntimeError(
            f"a worker ended or hung; its log {self._log} ends with {end}"
        )

    def stop(self) -> None:
        """End it."""
        if self._process.poll() is None:
            try:
                self.send("quit")
                self._process.wait(10)
            except (OSError, subprocess.TimeoutExpired):
                self._process.kill()
        self._process.wait()


@contextmanager
def _workers(
    count: int, load: Load, environment: dict[str, str], folder: Path
) -> Iterator[list[_WorkerProcess]]:
    started: list[_WorkerProcess] = []
    try:
        for worker in range(count):
            own = {**environment, "RBLN_VISIBLE_DEVICES": str(worker)}
            log = folder / f"worker-{worker}.log"
            started.append(_WorkerProcess(replace(load, worker=worker), own, log))
        for process in started:
            process.answer(_START_S)
        yield started
    finally:
        for process in started:
            process.stop()


def measure(
    runtime: Runtime,
    transport: str,
    workers: int,
    load: Load,
    rounds: int,
    folder: Path,
) -> Transfer:
    """Start a server and workers, store and restore, and stop them.

    Args:
        runtime: The NPUs.
        transport: ``shm`` or ``pickle``.
        workers: Number of workers.
        load: What each does; its port and worker are filled in.
        rounds: Timed rounds. One more before them is verified and not counted.
        folder: For logs and the state of the simulated machine.

    Returns:
        Medians.

    Raises:
        RuntimeError: A worker failed, or restored other bytes than were stored.
        ServerFailedError: The server failed.
    """
    environment = serving_environment(runtime, folder / "cache")
    environment |= own_machine(folder, devices=max(workers, 1))
    environment["TORCH_RBLN_LOG_LEVEL"] = "ERROR"
    moved = Case(load.model, load.block_size, load.blocks, 1).bytes
    chunks = workers * load.requests * load.blocks
    server = CacheServer(
        CacheServerConfig(
            chunk_size=load.block_size,
            shm_name=f"rbln_bench_{os.getpid()}" if transport == "shm" else "",
            # Room for a round: from 80 % on the server evicts.
            l1_size_gb=max(0.5, 1.5 * workers * load.requests * moved / 2**30),
        ),
        environment,
        folder / "logs",
        name=f"lmcache-server-{transport}-{workers}",
    )
    results = []
    server.start()
    try:
        server.wait_ready()
        placed = replace(load, port=server.port)
        with _workers(workers, placed, environment, folder / "logs") as started:
            for turn in range(rounds + 1):
                stored = _together(started, f"store {turn}")
                server.wait_stored(chunks)
                restored = _together(started, f"restore {turn}")
                if turn == 0:
                    _together(started, "verify 0")
                else:
                    results.append((stored, restored))
                server.clear()
    finally:
        server.stop()
    return summary(transport, workers, load.requests, moved, results)


def _together(workers: Sequence[_WorkerProcess], command: str) -> list[dict[str, Any]]:
    for worker in workers:
        worker.send(command)
    return [worker.answer(_ANSWER_S) for worker in workers]


Answers = list[dict[str, Any]]


def summary(
    transport: str,
    workers: int,
    requests: int,
    request_bytes: int,
    rounds: Sequence[tuple[Answers, Answers]],
) -> Transfer:
    """Summarise the workers' answers to store and restore, round by round."""

    def speed(answers: Answers) -> float:
        seconds = max(a["end"] for a in answers) - min(a["begin"] for a in answers)
        return workers * requests * request_bytes / seconds / 1e9

    def calls(answers: list[Answers]) -> list[float]:
        return [1e3 * call for group in answers for a in group for call in a["calls"]]

    stores = calls([stored for stored, _ in rounds])
    restores = calls([restored for _, restored in rounds])
    return Transfer(
        transport=transport,
        workers=workers,
        request_bytes=request_bytes,
        stored_gb_per_s=statistics.median(speed(stored) for stored, _ in rounds),
        restored_gb_per_s=statistics.median(speed(done) for _, done in rounds),
        store_ms=statistics.median(stores),
        store_max_ms=max(stores),
        restore_ms=statistics.median(restores),
        restore_max_ms=max(restores),
    )
