# SPDX-License-Identifier: Apache-2.0
"""Child processes that find out what can't be found out safely in this one.

A probe prints one line per fact as soon as it knows it, so what it learned before it
crashed or hung is not lost.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
import json
import os
import signal
import subprocess
import sys
import tempfile

# Local
from lmcache_rbln.diagnose.result import one_line

# Starts a line that holds a fact; the libraries that a probe imports print others.
_MARK = "@lmcache-rbln-fact "
_KILL_WAIT_S = 5.0


@dataclass(frozen=True)
class Facts:
    """What a probe found out.

    Attributes:
        topics: The facts by topic.
        problem: How the probe ended before it was done, or empty.
    """

    topics: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    problem: str = ""

    def get(self, topic: str) -> dict[str, Any]:
        """Return a topic's facts; if it has none, ``{"error": why}``."""
        if topic in self.topics:
            return self.topics[topic]
        return {"error": self.problem or "the probe did not get that far"}


def tell(topic: str, **facts: Any) -> None:
    """Report facts from within a probe."""
    line = _MARK + json.dumps({"topic": topic, **facts}, default=str)
    print(f"\n{line}", flush=True)


def run_probe(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    timeout_s: float,
) -> Facts:
    """Run a probe to its end, however it ends.

    Args:
        module: The module to run, as for ``python -m``.
        arguments: Its arguments.
        environment: Its whole environment.
        timeout_s: It is killed after this many seconds.

    Returns:
        What it told.
    """
    # A file, not a pipe: a process that outlives the probe would keep a pipe open.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return Facts(problem=f"can't start {sys.executable}: {error}")
        problem = _wait(child, timeout_s)
        output.seek(0)
        lines = output.read().splitlines()
    topics: dict[str, dict[str, Any]] = {}
    for line in lines:
        if line.startswith(_MARK):
            with suppress(ValueError, KeyError):
                facts = json.loads(line[len(_MARK) :])
                topics[facts.pop("topic")] = facts
    if problem.startswith("exit code"):
        last = next((one_line(text) for text in reversed(lines) if text.strip()), "")
        problem = f"{problem}: {last}" if last else problem
    return Facts(topics, problem)


def _wait(child: subprocess.Popen[bytes], timeout_s: float) -> str:
    """Wait for a probe and return what went wrong, or an empty text."""
    try:
        code = child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        # A process that hangs inside a driver doesn't die; it is left behind.
        with suppress(subprocess.TimeoutExpired):
            child.wait(_KILL_WAIT_S)
        return f"no answer in {timeout_s:g} s"
    if code < 0:
        return f"it was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"exit code {code}" if code else ""
