# SPDX-License-Identifier: Apache-2.0
"""Tables, JSON and the chart."""

# Standard
from pathlib import Path
import json

# First Party
from benchmarks import _report
from benchmarks._cases import BLOCKS_FIRST, Case, Copies, Row
from benchmarks._targets import Check


def rows() -> list[Row]:
    case = Case("Qwen3-1.7B", 1024, 1, 1)
    times = {"floor": 0.010, "stock": 0.040, "ours": 0.008}
    reasons = {"generic": "not done after 2 s"}
    copies = {"ours": Copies(56, 28, 0, 0.0)}
    return [
        Row(case, BLOCKS_FIRST, "gather", times, copies, reasons),
        Row(case, BLOCKS_FIRST, "scatter", {**times, "generic": 0.9}, {}, {}, far=0.25),
    ]


def test_table_is_aligned() -> None:
    text = _report.table(["name", "n"], [["a", "1"], ["long name", "1000"]])
    assert text.splitlines() == [
        "name          n",
        "---------  ----",
        "a             1",
        "long name  1000",
    ]


def test_times_table() -> None:
    first, second = _report.times_table(rows()).splitlines()[2:]
    assert first.split()[-11:] == [
        *("10.00", "4.00", "-", "0.80", "5.00", "14.68"),
        *("56", "28", "n/a", "n/a", "0%"),
    ]
    assert second.split()[-12:-6] == ["10.00", "4.00", "90.00", "0.80", "5.00", "14.68"]
    assert second.endswith("25% in")
    assert _report.generic_notes(rows()) == [
        "generic, blocks-first gather: not done after 2 s"
    ]


def test_missed_targets_come_first_with_wanted_and_got() -> None:
    checks = [
        Check("HND gather", "one", "<= 0.95 x floor", "0.90", True),
        Check("HND gather", "two", "<= 0.95 x floor", "1.50", False),
    ]
    lines = _report.checks_table(checks).splitlines()
    assert lines[0].split()[:2] == ["MISSED", "target"]
    assert "two" in lines[2]
    assert lines[2].endswith("1.50")
    assert "<= 0.95 x floor" in lines[2]
    assert lines[-1].split() == ["HND", "gather", "1", "of", "2"]
    assert "MISSED" not in _report.checks_table(checks[:1])


def test_files(tmp_path: Path) -> None:
    chart = tmp_path / "new" / "chart.png"
    _report.draw(rows(), chart, "title")
    assert chart.read_bytes().startswith(b"\x89PNG")
    _report.write_json(tmp_path / "x.json", {"rows": [row.as_json() for row in rows()]})
    written = json.loads((tmp_path / "x.json").read_text())["rows"][0]
    assert written["case"]["model"] == "Qwen3-1.7B"
    assert written["seconds"]["ours"] == 0.008
    assert _report.machine("simulator")["versions"]["torch"]
