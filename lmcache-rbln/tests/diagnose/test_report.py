# SPDX-License-Identifier: Apache-2.0
"""The two forms of the report."""

# Standard
import json

# First Party
from lmcache_rbln.diagnose import report
from lmcache_rbln.diagnose.report import FAIL, OK, SKIP, WARN, Result, one_line

RESULTS = {
    "torch": Result(OK, "2.13.0+cpu", details={"a": ["x"]}),
    "RDS": Result(SKIP, "not used"),
    "NPU": Result(WARN, "in use", "a free one", "end pid 1"),
    "hash seed": Result(FAIL, "not set", "a fixed value", "export PYTHONHASHSEED=0"),
}


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
    assert report.as_text({"torch": RESULTS["torch"]}, 80).splitlines()[-1] == "OK"


def test_long_lines_are_wrapped_and_commands_stay_whole() -> None:
    command = "--kv-transfer-config='{" + "x" * 90 + "}'"
    lines = report.as_text(
        {"a": Result(FAIL, "b " * 60, "c", command)}, 60
    ).splitlines()
    assert sum(command in line for line in lines) == 1
    assert all(len(line) <= 60 for line in lines if command not in line)


def test_json_has_every_field_and_the_same_verdict() -> None:
    data = json.loads(report.as_json(RESULTS))
    assert (data["schema"], data["ok"]) == (report.SCHEMA, False)
    assert data["checks"][2] == {
        "name": "NPU",
        "status": "warn",
        "found": "in use",
        "wanted": "a free one",
        "fix": "end pid 1",
        "details": {},
    }
    assert json.loads(report.as_json({"NPU": RESULTS["NPU"]}))["ok"]


def test_errors_of_others_become_one_line() -> None:
    assert one_line("a\n  b\tc") == "a b c"
    assert one_line("x" * 300, 10) == "x" * 9 + "…"
