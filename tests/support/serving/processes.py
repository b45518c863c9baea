# SPDX-License-Identifier: Apache-2.0
"""Run one server: its log goes to a file and its whole session ends with it.

A server is started as the leader of a new session, so every process that it
starts can be found again, whatever their parents became.
"""

# Standard
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol
import os
import re
import signal
import subprocess
import time

# Third Party
import psutil

# First Party
from tests.support.serving.procfs import mapped_segments, session_members

POLL_S = 0.2
# How long helpers may take after their leader, and after SIGTERM.
HELPERS_S = 15.0
KILL_S = 60.0

# A line that names an exception, with or without a logger's prefix before it, or
# a program's refusal of its arguments.
_EXCEPTION_LINE = re.compile(
    r"\b([A-Z]\w*(?:Error|Exception)\b: .+)|^\S+: (error: .+)$"
)
# Says that something failed, never what.
_UNHELPFUL = (
    "Engine core initialization failed",
    "EngineCore encountered an issue",
    "EngineDeadError",
    "cancelled",
    "ulimit -n",  # vLLM's advice in every log
    "WorkerProc initialization failed",
)
# The simulated runtime's own word on a call that it refused.
_REFUSAL_LINE = re.compile(r"(\[rbln-sim\] .+)")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class ServerFailedError(RuntimeError):
    """A server died, did not become ready in time, or left something behind."""


class Program(Protocol):
    """A running program, the leader of its session; ``subprocess.Popen`` is one."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int) -> None: ...
    def terminate(self) -> None: ...


def start_program(
    command: list[str], env: Mapping[str, str], cwd: Path, log: Path
) -> Program:
    """Start a program as the leader of a new session.

    Args:
        command: Program and arguments.
        env: Its whole environment.
        cwd: Its working directory.
        log: File for its stdout and stderr; overwritten.

    Returns:
        The running program.

    Raises:
        OSError: If it cannot be started.
    """
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )


#: How servers are started; tests have a faster way.
launch: Callable[[list[str], Mapping[str, str], Path, Path], Program] = start_program


class ServerProcess:
    """One server process with everything that it starts.

    Args:
        name: What the server is called in messages.
        command: Program and arguments.
        env: The whole environment of the process.
        log_path: File that receives stdout and stderr; overwritten.
        cwd: Working directory; made when missing.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        cwd: Path,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.log_path = log_path
        self._env = dict(env)
        self._cwd = cwd
        # Shared memory that the server left behind and that was removed for it.
        self.leftovers: set[Path] = set()
        self._process: Program | None = None

    @property
    def pid(self) -> int:
        """Process id of the session's leader.

        Raises:
            ServerFailedError: If the server was never started.
        """
        return self._started().pid

    def start(self) -> None:
        """Start the server and return at once.

        Raises:
            ServerFailedError: If the program cannot be started.
        """
        self._cwd.mkdir(parents=True, exist_ok=True)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._process = launch(self.command, self._env, self._cwd, self.log_path)
        except OSError as error:
            raise ServerFailedError(
                f"{self.name} could not be started: {error}"
            ) from error

    def is_running(self) -> bool:
        """Whether the leader runs."""
        return self._process is not None and self._process.poll() is None

    def wait_ready(
        self,
        probe: Callable[[], bool],
        timeout_s: float,
        on_wait: Callable[[float], None] | None = None,
    ) -> float:
        """Wait until ``probe`` says that the server answers.

        Args:
            probe: Returns whether the server is ready; must not block for long.
            timeout_s: Longest wait in seconds.
            on_wait: Called with the seconds waited so far, about every poll.

        Returns:
            The seconds waited.

        Raises:
            ServerFailedError: If the server dies or the time is up, with the
                reason and the end of its log.
        """
        process = self._started()
        start = time.monotonic()
        while True:
            waited = time.monotonic() - start
            if process.poll() is not None:
                raise self.failure(f"ended with status {process.returncode}")
            if probe():
                return waited
            if waited > timeout_s:
                raise self.failure(f"was not ready after {timeout_s:.0f} s")
            if on_wait is not None:
                on_wait(waited)
            time.sleep(POLL_S)

    def wait_ended(self, timeout_s: float) -> int:
        """Wait until the leader ends by itself.

        Args:
            timeout_s: Longest wait in seconds.

        Returns:
            Its exit status.

        Raises:
            ServerFailedError: If it still runs then.
        """
        try:
            return self._started().wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self.failure(f"still runs after {timeout_s:.0f} s") from None

    def ends_within(self, timeout_s: float) -> bool:
        """Whether the leader ends within ``timeout_s`` seconds."""
        return _wait_until(lambda: not self.is_running(), timeout_s)

    def check_running(self) -> None:
        """Refuse to go on with a dead server.

        Raises:
            ServerFailedError: If the server has ended.
        """
        if not self.is_running():
            status = self._started().returncode
            raise self.failure(f"ended with status {status}")

    def stop(self, term_timeout_s: float = 60.0) -> bool:
        """End the leader politely, then whatever is left of its session.

        Shared memory that nobody maps any more is removed, see ``leftovers``.

        Args:
            term_timeout_s: How long the leader may take after SIGTERM.

        Returns:
            Whether everything ended without SIGKILL. Stopping twice, or a
            server that never started, is no error.

        Raises:
            ServerFailedError: If a process survives SIGKILL.
        """
        process = self._process
        if process is None:
            return True
        segments = self._segments()
        polite = True
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(term_timeout_s)
            except subprocess.TimeoutExpired:
                polite = False
        # Helpers (resource trackers) end a moment after a leader that ends.
        if not (polite and _wait_until(self._is_gone, HELPERS_S)):
            for number, grace_s in (
                (signal.SIGTERM, HELPERS_S),
                (signal.SIGKILL, KILL_S),
            ):
                segments |= self._segments()
                _signal_all(session_members(process.pid), number)
                if process.poll() is None:
                    process.send_signal(number)
                polite = polite and number != signal.SIGKILL
                if _wait_until(self._is_gone, grace_s):
                    break
            else:
                raise ServerFailedError(
                    f"{self.name}: processes {session_members(process.pid)} "
                    "survived SIGKILL"
                )
        process.wait()
        self._remove(segments)
        return polite

    def kill(self) -> None:
        """SIGKILL the whole session at once and remove its shared memory."""
        process = self._started()
        segments = self._segments()
        _signal_all(session_members(process.pid), signal.SIGKILL)
        process.wait()
        _wait_until(self._is_gone, KILL_S)
        self._remove(segments)

    def log(self) -> str:
        """The log so far, without colour codes."""
        if not self.log_path.exists():
            return ""
        return _ANSI.sub("", self.log_path.read_text(errors="replace"))

    def failure(self, what: str) -> ServerFailedError:
        """Describe a failure with its likeliest cause and the end of the log.

        Args:
            what: What happened, as the rest of a sentence about the server.

        Returns:
            The error, ready to raise.
        """
        log = self.log()
        reason = likely_reason(log)
        tail = "\n".join(f"  | {line[:240]}" for line in log.splitlines()[-25:])
        return ServerFailedError(
            f"{self.name} {what}.\n"
            f"reason: {reason or 'not named in the log'}\n"
            f"log: {self.log_path}\n{tail}"
        )

    def _started(self) -> Program:
        if self._process is None:
            raise ServerFailedError(f"{self.name} was not started")
        return self._process

    def _segments(self) -> set[Path]:
        members = session_members(self._started().pid)
        return set().union(*(mapped_segments(pid) for pid in members))

    def _remove(self, segments: set[Path]) -> None:
        """Remove what only the ended session used; others may share a segment."""
        left = {segment for segment in segments if segment.exists()}
        if left:
            left -= set().union(*(mapped_segments(pid) for pid in psutil.pids()))
        for segment in left:
            segment.unlink(missing_ok=True)
        self.leftovers |= left

    def _is_gone(self) -> bool:
        process = self._started()
        return process.poll() is not None and not session_members(process.pid)


def likely_reason(log: str) -> str | None:
    """Find the line of a log that says why a server failed.

    Args:
        log: Text of the log.

    Returns:
        The last line that names an exception and its message, skipping those
        that only report that another process failed, and the last refusal of
        the simulated runtime; ``None`` without any.
    """
    reasons = []
    for pattern in (_EXCEPTION_LINE, _REFUSAL_LINE):
        for line in reversed(log.splitlines()):
            found = pattern.search(line)
            if found and not any(text in line for text in _UNHELPFUL):
                reasons.append(found.group(found.lastindex or 0).strip())
                break
    return "\n        ".join(reasons) or None


def _signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S / 4)
    return True
