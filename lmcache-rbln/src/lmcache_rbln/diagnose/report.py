# SPDX-License-Identifier: Apache-2.0
"""What a check returns, and the report, for people and for programs."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any
import json
import textwrap

# Local
from lmcache_rbln.settings.masking import without_users

#: How a check ended; only ``FAIL`` makes the exit code 1.
OK, WARN, FAIL, SKIP = "ok", "warn", "fail", "skip"
#: Version of the JSON report; it grows when a key changes its meaning or goes.
SCHEMA = 1
_TEXT_COLUMN = 22


@dataclass(frozen=True)
class Result:
    """The outcome of one check.

    Attributes:
        status: How it ended.
        found: What is there.
        wanted: What should be there; empty if that is what was found.
        fix: What to do; empty if there is nothing to do.
        details: More of what was found, for programs; JSON-compatible.
    """

    status: str
    found: str
    wanted: str = ""
    fix: str = ""
    details: dict[str, Any] = field(default_factory=dict)


def one_line(text: object, limit: int = 200) -> str:
    """Return a text, mostly an error of others, as one line of at most ``limit``."""
    line = without_users(" ".join(str(text).split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def names_of(results: Mapping[str, Result], status: str) -> list[str]:
    """Return the names of the checks that ended so."""
    return [name for name, result in results.items() if result.status == status]


def as_json(results: Mapping[str, Result]) -> str:
    """Return the report as a JSON object, as ``README.md`` describes it."""
    checks = [{"name": name, **asdict(result)} for name, result in results.items()]
    is_well = not names_of(results, FAIL)
    report = {"schema": SCHEMA, "ok": is_well, "checks": checks}
    return json.dumps(report, indent=2, default=str)


def as_text(results: Mapping[str, Result], width: int) -> str:
    """Return the report as lines of at most ``width`` characters.

    A check that is well takes one line, as long as it fits; the others add what was
    wanted and the fix.
    """
    lines: list[str] = []
    for name, result in results.items():
        status = result.status.upper() if result.status == FAIL else result.status
        entries = [(f"{status:<6}{name}", result.found)]
        if result.status in (WARN, FAIL):
            entries += [("        wanted", result.wanted), ("        fix", result.fix)]
        for head, text in entries:
            # A command to copy stays whole: words are never broken.
            lines += textwrap.wrap(
                text,
                max(width, _TEXT_COLUMN + 20),
                initial_indent=head.ljust(_TEXT_COLUMN),
                subsequent_indent=" " * _TEXT_COLUMN,
                break_long_words=False,
                break_on_hyphens=False,
            )
    failed, warned = names_of(results, FAIL), names_of(results, WARN)
    summary = f"FAILED: {', '.join(failed)}" if failed else "OK"
    if warned:
        summary += f" (look at: {', '.join(warned)})"
    return "\n".join([*lines, summary])
