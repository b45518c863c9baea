# SPDX-License-Identifier: Apache-2.0
"""Starts ``vllm`` and ``lmcache`` as forks of a process that has vLLM imported.

Importing takes most of a server's start, and vLLM does it twice: in the process of the
API and in that of the engine. A fork is an ordinary start from there on, and its engine
is a fork too. The process has imported nothing of LMCache, which reads the environment
as it is imported, and has used no NPU. Only for a simulated one: nobody knows whether
the vendor's runtime may be loaded before a fork.

As a program, it reads a start from each line of its input, and writes a line for each
fork that begins or ends, until its input ends.
"""

# Standard
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import IO, Any
from unittest import mock
import gc
import json
import os
import queue
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading

# First Party
from tests.support.serving import processes
from tests.support.serving.processes import Program, start_program

REPO = Path(__file__).resolve().parents[2]
_PROGRAMS = ("vllm", "lmcache", "offline.py", "mp_worker.py")
#: What decides how vLLM's packages are imported; the rest is read when it is wanted,
#: or, by LMCache, the simulator and the tests' probes, after the fork.
_READ_AT_IMPORT = ("PYTHONHASHSEED", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
_READ_AT_IMPORT_PREFIXES = ("RBLN_", "TORCH", "VLLM_RBLN_")
_READ_LATER_PREFIX = "RBLN_SIM_"
_IS_SET_AT_IMPORT = "PROMETHEUS_MULTIPROC_DIR"
#: Each takes half a GiB.
_MOST_FORKERS = 3


class ForkedProgram:
    """A running fork; what ``subprocess.Popen`` is for an ordinary start.

    Args:
        pid: Of the fork, which leads a session.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def ended(self, returncode: int) -> None:
        """Note that it has ended, and how."""
        self.returncode = returncode
        self._ended.set()

    def poll(self) -> int | None:
        """How it has ended; ``None`` while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended.

        Raises:
            subprocess.TimeoutExpired: If it runs ``timeout`` seconds later.
        """
        if not self._ended.wait(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM, unless it has ended."""
        self.send_signal(signal.SIGTERM)


class ForkedPrograms:
    """Starts programs; each environment that imports differently has a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forkers: dict[frozenset[tuple[str, str]], Forker] = {}

    def start(
        self, command: list[str], env: Mapping[str, str], cwd: Path, log: Path
    ) -> Program:
        """Start a program; one that is not vLLM or LMCache as usual.

        Args:
            command: A Python script and its arguments.
            env: Its whole environment.
            cwd: Its working directory.
            log: File for its stdout and stderr; overwritten.

        Returns:
            The running program.
        """
        if Path(command[0]).name not in _PROGRAMS:
            return start_program(command, env, cwd, log)
        kind = _imported_as(env)
        with self._lock:
            if kind not in self._forkers:
                self._make_room()
                self._forkers[kind] = Forker(env)
            return self._forkers[kind].fork(command, env, cwd, log)

    def _make_room(self) -> None:
        """End those whose programs have ended, the oldest first."""
        for kind, forker in list(self._forkers.items()):
            if len(self._forkers) >= _MOST_FORKERS and not forker.running:
                self._forkers.pop(kind).close()

    def close(self) -> None:
        """End the processes that programs are forked from."""
        for forker in self._forkers.values():
            forker.close()
        self._forkers.clear()


@contextmanager
def forking() -> Iterator[ForkedPrograms]:
    """Let the servers of this process start as forks."""
    programs = ForkedPrograms()
    with mock.patch.object(processes, "launch", programs.start):
        try:
            yield programs
        finally:
            programs.close()


def _imported_as(env: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """What of an environment decides how vLLM's packages are imported."""
    decisive = {
        (name, value)
        for name, value in env.items()
        if name in _READ_AT_IMPORT
        or name.startswith(_READ_AT_IMPORT_PREFIXES)
        and not name.startswith(_READ_LATER_PREFIX)
    }
    return frozenset(decisive | {(_IS_SET_AT_IMPORT, str(_IS_SET_AT_IMPORT in env))})


class Forker:
    """A process that has vLLM imported.

    Args:
        env: Its environment.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=REPO,
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests = self._process.stdin
        self.running: dict[int, ForkedProgram] = {}
        self._begun: queue.Queue[ForkedProgram | None] = queue.Queue()
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stdout,), daemon=True
        )
        self._reader.start()

    def fork(
        self, command: list[str], env: Mapping[str, str], cwd: Path, log: Path
    ) -> ForkedProgram:
        """Start a program, see :meth:`ForkedPrograms.start`."""
        job = {"command": command, "env": dict(env), "cwd": str(cwd), "log": str(log)}
        self._requests.write(json.dumps(job) + "\n")
        self._requests.flush()
        program = self._begun.get()
        if program is None:
            raise RuntimeError("the process that has vLLM imported died, see above")
        return program

    def close(self) -> None:
        """End the process; its forks go on."""
        self._requests.close()
        self._process.wait()
        self._reader.join()

    def _read(self, answers: IO[str]) -> None:
        for line in answers:
            pid, status = json.loads(line)
            if status is None:
                self.running[pid] = ForkedProgram(pid)
                self._begun.put(self.running[pid])
            else:
                self.running.pop(pid).ended(status)
        for program in self.running.values():  # its end can't be learnt any more
            program.ended(-signal.SIGKILL)
        self._begun.put(None)


def _serve() -> None:
    # What is imported writes to stdout too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Third Party
    import setproctitle
    import vllm.entrypoints.cli.main
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.core  # noqa: F401

    # It finds the memory for titles as long as the environment is the first one.
    setproctitle.getproctitle()
    # No fork is to look through what is imported here for garbage.
    gc.freeze()

    def tell(pid: int, status: int | None) -> None:
        print(json.dumps((pid, status)), file=answers, flush=True)

    asleep, awake = os.pipe()
    for end in (asleep, awake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(awake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting = selectors.DefaultSelector()
    waiting.register(asleep, selectors.EVENT_READ)
    waiting.register(0, selectors.EVENT_READ)
    pending = b""
    while True:
        ready = {key.fd for key, _ in waiting.select()}
        if asleep in ready:
            os.read(asleep, 4096)
            with suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    tell(ended[0], os.waitstatus_to_exitcode(ended[1]))
        if 0 in ready:
            got = os.read(0, 1 << 16)
            if not got:
                return
            *lines, pending = (pending + got).split(b"\n")
            for line in lines:
                child = os.fork()
                if child == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    waiting.close()
                    answers.close()
                    os.close(asleep)
                    os.close(awake)
                    _become(json.loads(line))
                    return
                tell(child, None)


def _become(job: dict[str, Any]) -> None:
    """Be the program of a start; this process ends with it."""
    os.setsid()
    os.chdir(job["cwd"])
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(job["env"])
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    # A process that spawns has it before its first child, so it outlives all of them
    # and removes the shared memory of one that is killed.
    resource_tracker.ensure_running()
    os.register_at_fork(after_in_child=_close_ports)
    sys.argv = job["command"]
    places = job["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [
        str(Path(sys.argv[0]).parent),
        *(place for place in places if place and place not in sys.path),
    ]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _close_ports() -> None:
    """Close what the API's process listens on, in its engine, as a spawned one has it.

    vLLM looks at its end for who else has its port, and fails if that is a zombie.
    """
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            opened = socket.socket(fileno=descriptor)
        except OSError:  # it is something else
            continue
        if opened.family == socket.AF_INET and opened.getsockname()[1]:
            opened.close()
        else:
            opened.detach()


if __name__ == "__main__":
    _serve()
