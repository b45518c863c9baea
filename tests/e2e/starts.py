# SPDX-License-Identifier: Apache-2.0
"""Commands that end by themselves: ``vllm serve`` and ``lmcache server`` that refuse.

Importing vLLM takes longer than such a start does, so it is done once, see
``tests.support.forked_programs``. What vLLM's packages read of the environment at their
import is that of the first start; one that differs there asks for a process of its own.
"""

# Standard
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
import os
import signal
import subprocess
import sys

# First Party
from tests.support.forked_programs import Forker


@dataclass(frozen=True)
class Ended:
    """A command that has ended.

    Attributes:
        status: Its exit status; negative for a signal.
        log: What it wrote.
    """

    status: int
    log: str


class Starts:
    """Runs commands until they end, one at a time.

    Args:
        env: Environment of all of them.
        folder: Their working directory, and where their logs go.
        timeout_s: Longest time that one may take, in seconds.
    """

    def __init__(
        self, env: Mapping[str, str], folder: Path, timeout_s: float = 300.0
    ) -> None:
        self.env = dict(env)
        self.folder = folder
        self._timeout_s = timeout_s
        self._forker: Forker | None = None

    def vllm_serve(
        self, name: str, arguments: list[str], env: Mapping[str, str | None]
    ) -> Ended:
        """Run ``vllm serve`` in a fork of a process that has vLLM imported.

        Args:
            name: Of its log.
            arguments: What follows ``serve``.
            env: Changes of the environment; ``None`` takes a variable away.
        """
        if self._forker is None:
            self._forker = Forker(self.env)
        log = self.folder / f"{name}.log"
        command = [_script("vllm"), "serve", *arguments]
        env_of_it = self._environment(env)
        started = self._forker.fork(command, env_of_it, self.folder, log)
        try:
            status = started.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            status = started.wait()
        return Ended(status, log.read_text(errors="replace"))

    def run(self, command: list[str], env: Mapping[str, str | None]) -> Ended:
        """Run a command in a process of its own.

        Args:
            command: A console script of this environment, and its arguments.
            env: Changes of the environment; ``None`` takes a variable away.
        """
        ended = subprocess.run(
            [_script(command[0]), *command[1:]],
            cwd=self.folder,
            env=self._environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=self._timeout_s,
        )
        return Ended(ended.returncode, ended.stdout)

    def close(self) -> None:
        """End the process that starts are forked from."""
        if self._forker is not None:
            self._forker.close()

    def _environment(self, changes: Mapping[str, str | None]) -> dict[str, str]:
        merged: dict[str, str | None] = {**self.env, **changes}
        return {name: value for name, value in merged.items() if value is not None}


def _script(name: str) -> str:
    """Path of a console script of this environment."""
    return str(Path(sys.executable).parent / name)
