# SPDX-License-Identifier: Apache-2.0
"""The server benchmark: its arithmetic, and a small run."""

# Standard
from pathlib import Path
import json

# Third Party
import pytest

# First Party
from benchmarks import _gaps, _mp_transfer, mp_server
from benchmarks._ttft import FirstToken, break_even


def point(tokens: int, cold: float, warm: float) -> FirstToken:
    return FirstToken(tokens, tokens - 1, cold, warm)


def test_break_even_is_where_restoring_stays_faster() -> None:
    points = [point(512, 9, 5), point(1024, 9, 9), point(4096, 9, 1), point(2048, 9, 8)]
    assert break_even(points) == 2048
    assert break_even(points[:2]) is None
    assert break_even([]) is None
    assert "from 2048 tokens on" in mp_server.ttft_table(points)
    assert "not faster" in mp_server.ttft_table(points[:2])


def test_summary_spans_all_workers_and_takes_medians() -> None:
    slow = [
        {"begin": 10.0, "end": 12.0, "calls": [0.001]},
        {"begin": 10.5, "end": 14.0, "calls": [0.003]},
    ]
    quick = [{"begin": 0.0, "end": 1.0, "calls": [0.002]}] * 2
    result = _mp_transfer.summary("shm", 2, 3, 10**9, [(slow, quick)])
    assert result.stored_gb_per_s == pytest.approx(6 / 4)
    assert result.restored_gb_per_s == pytest.approx(6)
    assert result.store_ms == pytest.approx(2)
    assert result.store_max_ms == pytest.approx(3)
    assert result.restore_ms == result.restore_max_ms == pytest.approx(2)
    cells = mp_server.transfer_table([result]).splitlines()[-1].split()
    assert cells[:5] == ["shm", "2", "1000.0", "1.50", "6.00"]
    assert cells[5:] == ["2.00", "3.00", "2.00", "2.00"]


def test_gaps_are_between_tokens() -> None:
    times = tuple(float(n) for n in range(20)) + (24.0,)
    gaps = _gaps.summary("none", 5 * 10**6, 3, times)
    assert (gaps.median_ms, gaps.longest_ms) == (1000.0, 5000.0)
    assert 1000.0 < gaps.p95_ms < 5000.0
    cells = mp_server.gaps_table([gaps]).splitlines()[-1].split()
    assert cells == ["none", "5.0", "3", "1000.0", f"{gaps.p95_ms:.1f}", "5000.0"]


@pytest.mark.parametrize(
    "arguments", [["--rounds", "0"], ["--workers", "0"], ["--lengths", "256"]]
)
def test_wrong_use(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        mp_server.parse_arguments(arguments)


def test_quick_is_one_of_each() -> None:
    options = mp_server.parse_arguments(["--quick", "--workers", "2", "4"])
    assert options.workers == [2]
    assert options.rounds == 1
    load = mp_server.load_of(options)
    assert load.blocks * load.requests < 4


@pytest.mark.npu
@pytest.mark.slow
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = mp_server.main(
        [
            *("--quick", "--part", "transfer", "--workers", "2"),
            *("--transport", "shm", "--folder", str(tmp_path), "--check"),
        ]
    )
    printed = capsys.readouterr()
    # Whether it was fast enough is for a quiet machine to say.
    assert status == int("MISSED" in printed.out), printed.err
    written = json.loads((tmp_path / "mp_server.json").read_text())
    found = [(t["transport"], t["workers"]) for t in written["transfers"]]
    assert found == [("shm", 2)]
    assert all(t["restored_gb_per_s"] > 0 for t in written["transfers"])
    assert "asynchronous restore" in printed.out
