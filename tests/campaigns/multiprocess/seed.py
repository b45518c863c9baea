# SPDX-License-Identifier: Apache-2.0
"""One seed of the campaign: its processes, its steps, what is checked."""

# Future
from __future__ import annotations

# Standard
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
import os
import random
import signal
import time

# First Party
from tests.campaigns.multiprocess.child import PATIENCE_S, Child, FailedError
from tests.campaigns.multiprocess.server import command_line, serve
from tests.campaigns.multiprocess.tap import COUNTED, FAULTS, Fault
from tests.campaigns.multiprocess.worker import work
from tests.support.serving.servers import free_port

__all__ = ["COUNTED", "STEPS_OF_A_SEED", "FailedError", "Run", "command_line"]

LAYOUTS = ("blocks_first", "kv_first", "mla")
STEPS_OF_A_SEED = 13
#: Who looks something up may not hear what was found.
UNCOUNTED = ("worker forgotten", "server killed", "request aborted")


@dataclass(frozen=True)
class Options:
    """What a seed chooses for its whole run."""

    number: int
    layout: str
    shm: bool
    threads: int
    deferred: str
    device_faults: bool

    @classmethod
    def of(cls, number: int) -> Options:
        """Return those of a seed."""
        rng = random.Random(number)
        return cls(
            number,
            LAYOUTS[number % 3],
            number // 3 % 2 == 0,
            rng.randint(1, 8),
            rng.choice(("0", "latest", str(number))),
            rng.random() < 0.3,
        )


class Run:
    """One seed.

    Args:
        number: The seed.
        folder: For its logs.
        fired: See :class:`Tap`.
        plant: Plants a fault in a worker, or is None.

    Attributes:
        options: What it chose.
        found: How many chunks were verified and stored, how many loads lost.
    """

    def __init__(self, number: int, folder: Path, fired: Any, plant: Any) -> None:
        self.options = Options.of(number)
        self.found: Counter[str] = Counter()
        self._folder, self._fired, self._plant = folder, fired, plant
        self._rng = random.Random(number)
        self._port = free_port()
        self._name = f"campaign_{os.getpid()}" if self.options.shm else ""
        # Tokens that were hit since the server began; None if that is not known.
        self._hits: float | None = 0
        self._children: list[Child] = []

    def _start(self, target: Any, arguments: Any, name: str, environment: Any) -> Child:
        child = Child(target, arguments, self._folder / name, environment)
        self._children.append(child)
        return child

    def _start_server(self) -> Child:
        arguments = (self.options.threads, self._port, self._name)
        server = self._start(serve, arguments, "server", {})
        if server.hear() != ("ready", None):
            raise FailedError("the server did not start")
        self._hits = 0
        return server

    def _start_worker(self, number: int) -> Child:
        options = self.options
        environment = {
            "RBLN_SIM_STATE_DIR": str(self._folder / f"npu{number}"),
            "RBLN_SIM_DEFERRED": options.deferred,
            "RBLN_SIM_SEED": str(options.number),
            "LMCACHE_RBLN_TRANSPOSE_THREADS": str(self._rng.randint(1, 2)),
            "LMCACHE_RBLN_STAGING_MIB": self._rng.choice(("8", "32")),
        }
        if options.device_faults:
            environment["RBLN_SIM_FAULTS"] = "fail:d2h:p=0.002,fail:h2d:p=0.003"
        arguments = (options, self._port, self._fired, self._plant)
        worker = self._start(work, arguments, f"worker{number}", environment)
        if worker.hear() is None:
            raise FailedError(f"worker{number} died at its start")
        return worker

    def run(self, steps: int) -> None:
        """Run its first steps.

        Raises:
            FailedError: It found something.
        """
        self._server = self._start_server()
        self._workers = [self._start_worker(number) for number in (0, 1)]
        for number in range(steps):
            try:
                self._step(number)
            except FailedError as exc:
                raise FailedError(f"step {number}, with {self._fault}: {exc}") from exc
        for worker in self._workers:
            worker.end()
        self._check("clear")
        state = self._ask("status")
        for name in ("total_object_count", "memory_used_bytes", "workers"):
            if state[name]:
                raise FailedError(f"{state[name]} {name} are left")
        self._server.end()
        if self._name and (left := list(Path("/dev/shm").glob(f"*{self._name}*"))):
            raise FailedError(f"{left} are left")

    def _step(self, number: int) -> None:
        at = self.options.number * STEPS_OF_A_SEED + number
        # Each as often, and each behind any other: a killed server has no hits.
        turn, of_turn = divmod(at, len(FAULTS))
        fault = random.Random(turn).sample(FAULTS, len(FAULTS))[of_turn]
        struck = self._rng.randrange(2)
        self._fault = fault
        told = [self._rng.randrange(1 << 30) for _ in self._workers]
        skip, missed = self._rng.randint(0, 1), self._rng.random() < 0.3
        for index, worker in enumerate(self._workers):
            strike = fault if index == struck else None
            worker.say(("step", told[index], self._server.pid, strike, skip))
        waiting, died = set(self._workers), False
        while waiting:
            conns = [self._server.conn, *(each.conn for each in waiting)]
            ready = wait(conns, PATIENCE_S)
            if not ready:
                for child in (self._server, *waiting):
                    child.tell_stacks()
                raise FailedError("nobody says anything")
            if self._server.conn in ready:
                self._replace_server(fault, missed)
            for worker in [each for each in waiting if each.conn in ready]:
                waiting.discard(worker)
                said = worker.hear()
                if said is None:
                    if fault[0] != "worker killed" or worker.process.exitcode != -9:
                        raise FailedError(f"worker died: {worker.process.exitcode}")
                    died = True
                    index = self._workers.index(worker)
                    self._workers[index] = self._start_worker(index)
                    continue
                hits, found = said[1]
                self.found += found
                if self._hits is not None:
                    self._hits += hits
        if self._server.conn.poll():
            self._replace_server(fault, missed)
        if died or fault[0] == "worker forgotten":
            # The dead give nothing back, nor do LMCache's adapters while they do not
            # know a server: until its time is over it stays locked.
            os.kill(self._server.pid, signal.SIGUSR1)
            state = self._ask("later")
            locks = state["write_locked_count"] + state["read_locked_count"]
            self.found[f"locks left, {fault[0]}"] += locks
        if died or fault[0] in UNCOUNTED:
            self._hits = None
        self._check("status")

    def _replace_server(self, fault: Fault, missed: bool) -> None:
        said = self._server.hear()
        if said is not None or fault[0] != "server killed":
            raise FailedError(f"the server died: {self._server.process.exitcode}")
        self._server.conn.close()
        for worker in self._workers:
            if missed:
                worker.say(("lost",))
        self._server = self._start_server()

    def _ask(self, what: str) -> dict[str, Any]:
        self._server.say((what,))
        said = self._server.hear()
        if said is None:
            raise FailedError("the server died")
        state: dict[str, Any] = said[1]
        return state

    def _check(self, what: str) -> None:
        """Check what the server has, when all requests have ended."""
        state, deadline = self._ask(what), time.monotonic() + PATIENCE_S
        while self._wrong(state):
            if time.monotonic() > deadline:
                raise FailedError(f"{self._wrong(state)} on the server")
            time.sleep(0.002)
            state = self._ask(what)

    def _wrong(self, state: dict[str, Any]) -> str:
        for name in ("write_locked_count", "read_locked_count"):
            if state[name]:
                return f"{state[name]} {name}"
        if self._hits is not None and state["hit tokens"] != self._hits:
            return f"{state['hit tokens']} hit tokens, wanted {self._hits}"
        return ""

    def close(self) -> None:
        """End what still runs."""
        for child in self._children:
            child.kill()
        for left in Path("/dev/shm").glob(f"*campaign_{os.getpid()}*"):
            left.unlink()
