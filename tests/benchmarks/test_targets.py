# SPDX-License-Identifier: Apache-2.0
"""Rows that meet and rows that miss each target."""

# Standard
from typing import Any

# Third Party
import pytest

# First Party
from benchmarks import _targets
from benchmarks._cases import BLOCKS_FIRST, KV_FIRST, MLA, Case, Row
from benchmarks._counting import copies_of

LARGE = Case("Qwen3-1.7B", 1024, 1, 1)
LATENT = Case("DeepSeek-V3", 256, 4, 4)


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
