# SPDX-License-Identifier: Apache-2.0
"""A process of the campaign, which the campaign talks to over a pipe."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
import ctypes
import faulthandler
import multiprocessing
import os
import signal

#: What is awaited comes much sooner, unless it never does.
PATIENCE_S = 60.0


class FailedError(Exception):
    """What a seed found."""


class Child:
    """A process of a seed.

    Args:
        target: What it does with its end of a pipe and ``arguments``.
        log: Gets its output.
        environment: Added to this process's.
    """

    def __init__(
        self,
        target: Callable[..., None],
        arguments: tuple[Any, ...],
        log: Path,
        environment: dict[str, str],
    ) -> None:
        context = multiprocessing.get_context("fork")
        self.conn, theirs = context.Pipe()
        self.log = log

        def run() -> None:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with this process
            os.environ |= environment
            opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(opened, 1)
            os.dup2(opened, 2)
            os.close(opened)
            faulthandler.register(signal.SIGUSR2)
            target(theirs, *arguments)

        self.process = context.Process(target=run)
        self.process.start()
        theirs.close()
        self.pid = self.process.pid or 0

    def hear(self) -> tuple[str, Any] | None:
        """Return what it says, or None if it has died.

        Raises:
            FailedError: If it says nothing, or that it failed.
        """
        if not self.conn.poll(PATIENCE_S):
            self.tell_stacks()
            raise FailedError(f"{self.log.stem} says nothing")
        try:
            said: tuple[str, Any] = self.conn.recv()
        except EOFError:
            self.process.join()
            return None
        if said[0] == "failed":
            raise FailedError(f"{self.log.stem}: {said[1]}")
        return said

    def say(self, said: Any) -> None:
        """Tell it something, if it lives."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.conn.send(said)

    def end(self) -> None:
        """Let it end by itself."""
        self.say(("end",))
        if (said := self.hear()) is None or said[0] != "ended":
            raise FailedError(f"{self.log.stem} ended by {said}")
        self.process.join(PATIENCE_S)
        if self.process.exitcode:
            raise FailedError(f"{self.log.stem} ended with {self.process.exitcode}")

    def tell_stacks(self) -> None:
        """Let it log what its threads do."""
        os.kill(self.pid, signal.SIGUSR2)
        self.process.join(1.0)

    def kill(self) -> None:
        """End it now."""
        self.process.kill()
        self.process.join()
        self.conn.close()
