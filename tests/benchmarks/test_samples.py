# SPDX-License-Identifier: Apache-2.0
"""Which timed calls count."""

# Third Party
import pytest

# First Party
from benchmarks._cases import BLOCKS_FIRST, KV_FIRST, Case
from benchmarks._samples import Sample, least_calls, near_calls, rows_of

CASE = Case("Qwen3-1.7B", 128, 1, 1)
NEAR, FAR = 1.0, 3.0
SAMPLES = {
    ("floor", ""): [Sample(1.0, NEAR), Sample(3.0, FAR), Sample(2.0, NEAR)],
    ("stock", KV_FIRST): [Sample(8.0, NEAR), Sample(6.0, NEAR)],
    ("ours", BLOCKS_FIRST): [Sample(9.0, FAR), Sample(1.0, NEAR), Sample(9.0, FAR)],
    ("ours", KV_FIRST): [Sample(2.0, NEAR)],
    ("generic", KV_FIRST): [Sample(50.0, FAR)],
}


def test_calls_beside_slow_handovers_do_not_count_but_generic_s_do() -> None:
    kept = near_calls(SAMPLES, 2.0)
    assert {key: len(own) for key, own in kept.items()} == {
        ("floor", ""): 2,
        ("stock", KV_FIRST): 2,
        ("ours", BLOCKS_FIRST): 1,
        ("ours", KV_FIRST): 1,
        ("generic", KV_FIRST): 1,
    }
    assert least_calls(kept) == 1
    assert near_calls(SAMPLES, FAR) == SAMPLES


def test_rows_have_the_medians_of_the_calls_that_count_and_of_all() -> None:
    failures = {("generic", BLOCKS_FIRST): "too slow"}
    first, second = rows_of(CASE, "gather", SAMPLES, 2.0, 1, failures)
    assert (first.layout, second.layout) == (BLOCKS_FIRST, KV_FIRST)
    assert first.seconds == {"floor": 1.5, "stock": 7.0, "ours": 1.0}
    assert first.seconds_of_all == {"floor": 2.0, "stock": 7.0, "ours": 9.0}
    assert first.calls == {"floor": (2, 3), "stock": (2, 2), "ours": (1, 3)}
    assert first.failures == {"generic": "too slow"}
    assert second.seconds == {"floor": 1.5, "stock": 7.0, "ours": 2.0, "generic": 50.0}
    assert second.failures == {}
    assert first.far == second.far == pytest.approx(3 / 10)
    assert not first.all_count


def test_with_too_few_calls_that_count_all_do() -> None:
    for row in rows_of(CASE, "gather", SAMPLES, 2.0, 2, {}):
        assert row.seconds == row.seconds_of_all
        assert row.all_count
        assert row.far == pytest.approx(3 / 10)
