# SPDX-License-Identifier: Apache-2.0
"""What a check returns."""

# Future
from __future__ import annotations

# Standard
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

# Local
from lmcache_rbln.settings.masking import without_users


class Status(str, Enum):
    """How a check ended; only ``FAIL`` makes the exit code 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True)
class Result:
    """The outcome of one check.

    Attributes:
        name: What was checked.
        status: How it ended.
        found: What is there.
        wanted: What should be there; empty if that is what was found.
        fix: What to do; empty if there is nothing to do.
        details: More of what was found, for programs; JSON-compatible.
    """

    name: str
    status: Status
    found: str
    wanted: str = ""
    fix: str = ""
    details: dict[str, Any] = field(default_factory=dict)


def ok(name: str, found: str, **details: Any) -> Result:
    """Return a result that all is well."""
    return Result(name, Status.OK, found, details=details)


def skip(name: str, found: str, **details: Any) -> Result:
    """Return a result that the check does not apply here."""
    return Result(name, Status.SKIP, found, details=details)


def warn(name: str, found: str, wanted: str, fix: str, **details: Any) -> Result:
    """Return a result that may be what the user wants."""
    return Result(name, Status.WARN, found, wanted, fix, details)


def fail(name: str, found: str, wanted: str, fix: str, **details: Any) -> Result:
    """Return a result that keeps the KV cache from working."""
    return Result(name, Status.FAIL, found, wanted, fix, details)


def one_line(text: object, limit: int = 200) -> str:
    """Return a text, mostly an error of others, as one line of at most ``limit``."""
    line = without_users(" ".join(str(text).split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"
