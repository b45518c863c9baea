# SPDX-License-Identifier: Apache-2.0
"""Child processes that find out what can't be found out safely in this one.

A probe prints one line per fact as soon as it knows it, so what it learned before it
crashed or hung is not lost.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
import json
import sys

# Local
from lmcache_rbln.diagnose.command import run_command
from lmcache_rbln.diagnose.result import one_line

# Starts a line that holds a fact; the libraries that a probe imports print others.
_MARK = "@lmcache-rbln-fact "


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


def explain(error: BaseException) -> str:
    """Return an error of others in a line."""
    return one_line(f"{type(error).__name__}: {error}")


def guard(topic: str, part: Callable[..., None], *arguments: Any) -> None:
    """Run a part of a probe; an error in it becomes what is known of its topic."""
    try:
        part(*arguments)
    except Exception as error:
        tell(topic, error=explain(error))


def run_probe(
    module: str,
    request: object,
    environment: Mapping[str, str],
    timeout_s: float,
) -> Facts:
    """Run a probe to its end, however it ends.

    Args:
        module: The module to run, as for ``python -m``.
        request: What it is asked, which it gets as JSON on its standard input: there
            nobody else sees it.
        environment: Its whole environment.
        timeout_s: It is killed after this many seconds.

    Returns:
        What it told.
    """
    ended = run_command(
        [sys.executable, "-m", module], timeout_s, environment, json.dumps(request)
    )
    topics: dict[str, dict[str, Any]] = {}
    for line in ended.output.split("\n"):
        if line.startswith(_MARK):
            # Whatever else begins so is somebody else's.
            with suppress(Exception):
                facts = json.loads(line[len(_MARK) :])
                topics[str(facts.pop("topic"))] = facts
    problem = ended.problem
    if ended.code:
        lines = (ended.errors.strip() or ended.output.strip()).splitlines()
        problem = f"exit code {ended.code}: {one_line(lines[-1]) if lines else ''}"
    return Facts(topics, problem)
