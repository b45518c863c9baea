# SPDX-License-Identifier: Apache-2.0
"""Rows that meet and rows that miss each target."""

# Standard
from typing import Any

# Third Party
import pytest

# First Party
from benchmarks import _report, _targets
from benchmarks._cases import BLOCKS_FIRST, KV_FIRST, MLA, Case, Copies, Row
from benchmarks._counting import copies_of

LARGE = Case("Qwen3-1.7B", 1024, 1, 1)
SMALL = Case("Qwen3-1.7B", 128, 1, 1)
LATENT = Case("DeepSeek-V3", 256, 4, 4)
THREADS = Case("Qwen3-1.7B", 128, 2, 1, threads=4)


def missed(
    case: Case, layout: str, direction: str, ours: float, stock: float
) -> list[str]:
    seconds = {"floor": 1.0, "stock": stock, "ours": ours}
    checks = _targets.check_times([Row(case, layout, direction, seconds)])
    return [check.target for check in checks if not check.held]


@pytest.mark.parametrize(
    ("case", "layout", "direction", "most", "least"),
    [
        (LARGE, BLOCKS_FIRST, "gather", 0.95, 2.0),
        (LARGE, KV_FIRST, "gather", 0.95, 2.0),
        (LARGE, BLOCKS_FIRST, "scatter", 1.10, 1.8),
        (LATENT, MLA, "gather", 1.15, 1.5),
        (LATENT, MLA, "scatter", 1.15, 1.5),
    ],
)
def test_floor_and_stock(
    case: Case, layout: str, direction: str, most: float, least: float
) -> None:
    name = [f"{'MLA' if layout == MLA else 'HND'} {direction}"]
    assert not missed(case, layout, direction, most, least * most)
    assert missed(case, layout, direction, most + 0.01, 10) == name
    assert missed(case, layout, direction, most, (least - 0.01) * most) == name


def test_one_block_and_threads_against_stock() -> None:
    assert "one 128-token block" in missed(SMALL, KV_FIRST, "scatter", 1.0, 1.29)
    assert "one 128-token block" not in missed(SMALL, KV_FIRST, "scatter", 1.0, 1.3)
    assert not missed(THREADS, KV_FIRST, "gather", 5.0, 5.0)
    assert missed(THREADS, KV_FIRST, "gather", 5.0, 4.9) == ["any row"]


@pytest.mark.parametrize(("layout", "limit"), [(BLOCKS_FIRST, 1), (KV_FIRST, 2)])
@pytest.mark.parametrize("adjacent", [True, False])
def test_descriptors(layout: str, limit: int, adjacent: bool) -> None:
    case = Case("Qwen3-1.7B", 128, 8, 4, adjacent=adjacent)
    most = 28 * limit * (2 if adjacent else 8)
    rows = [
        Row(case, layout, "gather", copies={"ours": Copies(1, descriptors, 0.0)})
        for descriptors in (most, most + 28)
    ]
    checks = _targets.check_descriptors([*rows, Row(case, layout, "gather")])
    assert [check.held for check in checks] == [True, False]


def test_modelled_time_is_judged_by_the_bytes_or_by_the_cheaper_way() -> None:
    # One head: 64 KiB of K and V take a microsecond, their descriptor 17.
    heads = Case("Llama-3.1-70B TP8", 128, 4, 4)
    direct = _targets.direct_seconds(heads, BLOCKS_FIRST)
    coalesced = _targets.coalesced_seconds(heads)
    wire = LARGE.bytes / 58e9
    rows = [
        Row(case, BLOCKS_FIRST, "gather", hardware=Copies(1, 1, seconds))
        for case, seconds in (
            (LARGE, 1.5 * wire),
            (LARGE, 1.52 * wire),
            (heads, coalesced),
            (heads, direct),
        )
    ]
    checks = _targets.check_modelled([*rows, Row(LARGE, KV_FIRST, "gather")])
    assert [check.held for check in checks] == [True, False, True, False]


MB = 1_000_000
ASYNC, PAGEABLE, INSIDE = 17e-6 + MB / 58e9, 17e-6 + MB / 14e9, MB / 240e9


def copy(begin: int, kind: str = "d2h", stream: int | None = 1) -> dict[str, Any]:
    place = {"device": 0, "stream": stream, "via": "link", "begin": begin}
    return {"kind": kind, "bytes": MB, "descriptors": 1, **place}


@pytest.mark.parametrize(
    ("copies", "seconds"),
    [
        ([], 0.0),
        ([{**copy(0), "descriptors": 3}], ASYNC + 2 * 17e-6),
        # One link, whatever the streams.
        ([copy(0), copy(1, stream=2)], 2 * ASYNC),
        # Two links, two streams: together.
        ([copy(0), copy(1, kind="h2d", stream=2)], ASYNC),
        # Two links, one stream: one after the other.
        ([copy(0, kind="d2d"), copy(1)], INSIDE + ASYNC),
        # A synchronous copy waits for all, and all wait for it.
        ([copy(0), copy(1, kind="d2d", stream=None)], ASYNC + INSIDE),
        ([copy(1), copy(0, stream=None)], PAGEABLE + ASYNC),
        # What crosses no link is no copy.
        ([{**copy(0), "via": "host"}, copy(1, kind="wait")], 0.0),
    ],
)
def test_modelled_seconds(copies: list[dict[str, Any]], seconds: float) -> None:
    assert copies_of(copies).modelled_s == pytest.approx(seconds)


def test_stores_and_restores_on_the_engines_thread() -> None:
    stores, restores = {"shm": 1.0, "pickle": 1.01}, {"shm": 0.3, "pickle": 0.31}
    held = [c.held for c in _targets.check_engine_time(stores, restores)]
    assert held == [True, False] * 2


def test_missed_targets_come_first_with_wanted_and_got() -> None:
    check = _targets.Check("HND gather", "two", "<= 0.95 x floor", "1.50", False)
    good = _targets.Check("HND gather", "one", "<= 0.95 x floor", "0.90", True)
    lines = _report.checks_table([good, check]).splitlines()
    assert lines[0].startswith("MISSED target")
    assert lines[2].split() == [
        "HND",
        "gather",
        "two",
        *["<=", "0.95", "x", "floor", "1.50"],
    ]
    assert lines[-1].split() == ["HND", "gather", "1", "of", "2"]
    assert "MISSED" not in _report.checks_table([good])
