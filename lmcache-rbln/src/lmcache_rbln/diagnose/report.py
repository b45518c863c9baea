# SPDX-License-Identifier: Apache-2.0
"""The report, for people and for programs."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Sequence
import json
import textwrap

# Local
from lmcache_rbln.diagnose.result import Result, Status

#: Version of the JSON report; it grows when a key changes its meaning or goes.
SCHEMA = 1
_NAME_COLUMN = 6
_TEXT_COLUMN = 22
_SETTLED = (Status.OK, Status.SKIP)


def is_well(results: Sequence[Result]) -> bool:
    """Return whether no check failed."""
    return all(result.status is not Status.FAIL for result in results)


def as_json(results: Sequence[Result]) -> str:
    """Return the report as a JSON object.

    Returns:
        ``{"schema": 1, "ok": bool, "checks": [{"name", "status", "found", "wanted",
        "fix", "details"}, ...]}``.
    """
    checks = [
        {
            "name": result.name,
            "status": result.status.value,
            "found": result.found,
            "wanted": result.wanted,
            "fix": result.fix,
            "details": result.details,
        }
        for result in results
    ]
    report = {"schema": SCHEMA, "ok": is_well(results), "checks": checks}
    return json.dumps(report, indent=2, default=str)


def as_text(results: Sequence[Result], width: int) -> str:
    """Return the report as lines of at most ``width`` characters.

    A check that is well takes one line, as long as it fits; the others add what was
    wanted and the fix.
    """
    lines: list[str] = []
    for result in results:
        lines += _entry(result.status.value, result.name, result.found, width)
        if result.status not in _SETTLED:
            lines += _entry("", "  wanted", result.wanted, width)
            lines += _entry("", "  fix", result.fix, width)
    failed = [r.name for r in results if r.status is Status.FAIL]
    warned = [r.name for r in results if r.status is Status.WARN]
    summary = f"FAILED: {', '.join(failed)}" if failed else "OK"
    if warned:
        summary += f" (look at: {', '.join(warned)})"
    return "\n".join([*lines, summary])


def _entry(status: str, name: str, text: str, width: int) -> list[str]:
    if not text:
        return []
    shown = status.upper() if status == Status.FAIL.value else status
    head = f"{shown:<{_NAME_COLUMN}}{name}".ljust(_TEXT_COLUMN)
    # A command to copy stays whole: words are never broken.
    return textwrap.wrap(
        text,
        max(width, _TEXT_COLUMN + 20),
        initial_indent=head,
        subsequent_indent=" " * _TEXT_COLUMN,
        break_long_words=False,
        break_on_hyphens=False,
    )
