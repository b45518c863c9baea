# SPDX-License-Identifier: Apache-2.0
"""Counts and modelled time of traced copies."""

# Standard
from typing import Any

# Third Party
import pytest

# First Party
from benchmarks import _copies

MB = 1_000_000


def copy(
    begin: int, kind: str = "d2h", stream: int | None = 1, descriptors: int = 1
) -> dict[str, Any]:
    return {
        "kind": kind,
        "bytes": MB,
        "descriptors": descriptors,
        "device": 0,
        "stream": stream,
        "via": "link",
        "begin": begin,
    }


ASYNC = 17e-6 + MB / 58e9
PAGEABLE = 17e-6 + MB / 14e9
INSIDE = MB / 240e9


@pytest.mark.parametrize(
    ("copies", "seconds"),
    [
        ([], 0.0),
        ([copy(0)], ASYNC),
        ([copy(0, descriptors=3)], ASYNC + 2 * 17e-6),
        # One link, whatever the streams.
        ([copy(0), copy(1, stream=2)], 2 * ASYNC),
        # Two links, two streams: together.
        ([copy(0), copy(1, kind="h2d", stream=2)], ASYNC),
        ([copy(0, kind="d2d", stream=2), copy(1)], ASYNC),
        # Two links, one stream: one after the other.
        ([copy(0, kind="d2d"), copy(1)], INSIDE + ASYNC),
        # A synchronous copy waits for all, and all wait for it.
        ([copy(0), copy(1, kind="d2d", stream=None)], ASYNC + INSIDE),
        ([copy(1), copy(0, stream=None)], PAGEABLE + ASYNC),
    ],
)
def test_modelled_time(copies: list[dict[str, Any]], seconds: float) -> None:
    assert _copies.modelled_seconds(copies) == pytest.approx(seconds)


def test_counts() -> None:
    wait = copy(5, kind="wait", stream=None)
    lines = [copy(0, descriptors=4), copy(1, kind="d2d", descriptors=7), wait]
    lines.append({**copy(2), "via": "host"})
    counts = _copies.count(lines)
    assert counts.submissions == 2
    assert (counts.host_descriptors, counts.device_descriptors) == (4, 7)
