# SPDX-License-Identifier: Apache-2.0
"""Commands that end by themselves: ``vllm serve`` and ``lmcache server`` that refuse.

Importing vLLM takes longer than such a start does, so it is done once: every
``vllm serve`` is forked from a process that has it imported, and is an ordinary one
from there on. What vLLM's packages read of the environment at their import is that of
the first process; a start that differs there asks for a process of its own.
"""

# Standard
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
import json
import os
import signal
import subprocess
import sys
import threading

_FORK_ON_REQUEST = """
import json, os, sys

# What is imported writes to stdout too.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

from vllm.entrypoints.cli.main import main
import vllm.entrypoints.openai.api_server

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(job["folder"])
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.clear()
        os.environ.update(job["env"])
        sys.argv = job["command"]
        sys.exit(main())
    print(child, file=answers, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
"""


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
        self._forker: subprocess.Popen[str] | None = None

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
            self._forker = subprocess.Popen(
                [sys.executable, "-c", _FORK_ON_REQUEST],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        log = self.folder / f"{name}.log"
        job: dict[str, Any] = {
            "command": ["vllm", "serve", *arguments],
            "env": self._environment(env),
            "folder": str(self.folder),
            "log": str(log),
        }
        self._forker.stdin.write(json.dumps(job) + "\n")
        self._forker.stdin.flush()
        leader = int(self._forker.stdout.readline())
        too_late = threading.Timer(self._timeout_s, os.killpg, (leader, signal.SIGKILL))
        too_late.start()
        try:
            status = int(self._forker.stdout.readline())
        finally:
            too_late.cancel()
        return Ended(status, log.read_text(errors="replace"))

    def run(self, command: list[str], env: Mapping[str, str | None]) -> Ended:
        """Run a command in a process of its own.

        Args:
            command: A console script of this environment, and its arguments.
            env: Changes of the environment; ``None`` takes a variable away.
        """
        program = Path(sys.executable).parent / command[0]
        ended = subprocess.run(
            [str(program), *command[1:]],
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
            self._forker.communicate("")

    def _environment(self, changes: Mapping[str, str | None]) -> dict[str, str]:
        merged: dict[str, str | None] = {**self.env, **changes}
        return {name: value for name, value in merged.items() if value is not None}
