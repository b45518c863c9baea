# SPDX-License-Identifier: Apache-2.0
"""The two forms of the report."""

# Future
from __future__ import annotations

# Standard
import json

# First Party
from lmcache_rbln.diagnose import report
from lmcache_rbln.diagnose.result import fail, ok, one_line, skip, warn

RESULTS = [
    ok("torch", "2.13.0+cpu", wishes=["x"]),
    skip("RDS", "not used"),
    warn("NPU", "in use", "a free one", "end pid 1"),
    fail("hash seed", "not set", "a fixed value", "export PYTHONHASHSEED=0"),
]


def test_text_shows_wish_and_fix_of_what_is_not_well_only() -> None:
    assert report.as_text(RESULTS, 80).splitlines() == [
        "ok    torch           2.13.0+cpu",
        "skip  RDS             not used",
        "warn  NPU             in use",
        "        wanted        a free one",
        "        fix           end pid 1",
        "FAIL  hash seed       not set",
        "        wanted        a fixed value",
        "        fix           export PYTHONHASHSEED=0",
        "FAILED: hash seed (look at: NPU)",
    ]


def test_the_last_line_when_all_is_well() -> None:
    assert report.as_text(RESULTS[:2], 80).splitlines()[-1] == "OK"
    assert report.as_text(RESULTS[:3], 80).splitlines()[-1] == "OK (look at: NPU)"


def test_long_lines_are_wrapped_and_commands_stay_whole() -> None:
    command = "--kv-transfer-config='{" + "x" * 90 + "}'"
    lines = report.as_text([fail("a", "b " * 60, "c", command)], 60).splitlines()
    assert sum(command in line for line in lines) == 1
    assert all(len(line) <= 60 for line in lines if command not in line)


def test_json_has_every_field_and_the_same_verdict() -> None:
    for results in (RESULTS, RESULTS[:3], []):
        data = json.loads(report.as_json(results))
        assert set(data) == {"schema", "ok", "checks"}
        assert data["schema"] == report.SCHEMA
        assert data["ok"] is report.is_well(results)
        for check, result in zip(data["checks"], results, strict=True):
            assert check == {
                "name": result.name,
                "status": result.status.value,
                "found": result.found,
                "wanted": result.wanted,
                "fix": result.fix,
                "details": result.details,
            }
    assert report.is_well(RESULTS[:3])
    assert not report.is_well(RESULTS)


def test_errors_of_others_become_one_line() -> None:
    assert one_line("a\n  b\tc") == "a b c"
    assert one_line("x" * 300, 10) == "x" * 9 + "…"
