#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Refuse a test run that validated nothing: no test ran, or none found an NPU."""

# Standard
from pathlib import Path
import sys
import xml.etree.ElementTree as ElementTree

# The reason that the conftest at the root gives when there is no NPU to test on.
NO_DEVICE = "no NPU and no simulator"


def find_problems(report: Path) -> list[str]:
    """Read a JUnit report.

    Args:
        report: File written by ``pytest --junitxml``.

    Returns:
        One sentence per reason to refuse the run; empty when it counts.
    """
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    ran = [case for case in cases if case.find("skipped") is None]
    problems = []
    if not ran:
        problems.append(f"none of {len(cases)} tests ran")
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            problems.append(f"{_name(case)} failed")
        skipped = case.find("skipped")
        if skipped is not None and NO_DEVICE in skipped.get("message", ""):
            problems.append(f"{_name(case)} was skipped: {skipped.get('message')}")
    return problems


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '')}::{case.get('name', '')}"


def main() -> int:
    """Check the report named on the command line; exit status 1 refuses it."""
    if len(sys.argv) != 2:
        print("usage: check_results.py REPORT.xml", file=sys.stderr)
        return 2
    problems = find_problems(Path(sys.argv[1]))
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
