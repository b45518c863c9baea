# SPDX-License-Identifier: Apache-2.0
"""Child processes that find out what can't be found out safely in this one.

A probe prints one line per fact as soon as it knows it, so what it learned before it
crashed or hung is not lost. The facts are gathered in the modules of the checks.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any
import json
import os
import signal
import subprocess
import sys
import tempfile

# Local
from lmcache_rbln.diagnose.report import one_line

# Starts a line that holds a fact; the libraries that a probe imports print others.
_MARK = "@lmcache-rbln-fact "


@dataclass(frozen=True)
class Facts:
    """What a probe found out: the facts by topic, and how it ended too early if so."""

    topics: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    problem: str = ""

    def get(self, topic: str) -> dict[str, Any]:
        """Return a topic's facts; if it has none, ``{"error": why}``."""
        why = self.problem or "the probe did not get that far"
        return self.topics.get(topic, {"error": why})


def explain(error: BaseException) -> str:
    """Return an error of others, or what caused it, in a line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(f"{type(error).__name__}: {error}")


def tell(topic: str, gather: Callable[..., dict[str, Any]], *arguments: Any) -> None:
    """Report the facts of a topic from within a probe.

    Args:
        topic: The topic.
        gather: Returns its facts; an error becomes what is known of it.
        arguments: For it.
    """
    try:
        facts = gather(*arguments)
    except Exception as error:
        facts = {"error": explain(error)}
    line = _MARK + json.dumps({"topic": topic, **facts}, default=str)
    print(f"\n{line}", flush=True)


def run_command(
    command: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    text: str = "",
) -> tuple[str, str]:
    """Run a program and kill it, with all that it started, when its time is over.

    Args:
        command: Program and arguments.
        timeout_s: Its time.
        environment: Its whole environment; this process's by default.
        text: Its standard input.

    Returns:
        Its standard output, and why it did not end well or an empty text.
    """
    with ExitStack() as files:
        # No pipes: a process that outlives the program would keep one open.
        given, output, errors = (
            files.enter_context(tempfile.TemporaryFile()) for _ in range(3)
        )
        given.write(text.encode())
        given.seek(0)
        try:
            child = subprocess.Popen(
                command,
                env=environment,
                stdin=given,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
            code, problem = child.wait(timeout_s), ""
        except OSError as error:
            return "", f"can't start {command[0]}: {error.strerror}"
        except subprocess.TimeoutExpired:
            # A process that hangs inside a driver doesn't die; it is left behind.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            code, problem = 0, f"no answer in {timeout_s:g} s"
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    if code < 0:
        problem = f"it was ended by signal {-code} ({signal.Signals(-code).name})"
    elif code:
        last = "".join(texts).strip().rpartition("\n")[2]
        problem = f"exit code {code}: {one_line(last)}"
    return texts[0], problem


def run_probe(
    words: Sequence[str],
    asked: Mapping[str, Any],
    environment: Mapping[str, str],
    timeout_s: float,
) -> Facts:
    """Run a probe to its end, however it ends.

    Args:
        words: What to run, as for ``python -m``.
        asked: What it gets as JSON on its standard input: there nobody else sees it.
        environment: Its whole environment.
        timeout_s: It is killed after this many seconds.

    Returns:
        What it told.
    """
    command = [sys.executable, "-m", *words]
    output, problem = run_command(command, timeout_s, environment, json.dumps(asked))
    topics: dict[str, dict[str, Any]] = {}
    for line in output.split("\n"):
        if line.startswith(_MARK):
            # Whatever else begins so is somebody else's.
            with suppress(Exception):
                facts = json.loads(line[len(_MARK) :])
                topics[str(facts.pop("topic"))] = facts
    return Facts(topics, problem)
