# SPDX-License-Identifier: Apache-2.0
"""Rows that meet and rows that miss each target."""

# Third Party
import pytest

# First Party
from benchmarks import _targets
from benchmarks._cases import BLOCKS_FIRST, KV_FIRST, MLA, Case, Copies, Row

LARGE = Case("Qwen3-1.7B", 1024, 1, 1)
LATENT = Case("DeepSeek-V3", 256, 4, 4)


def row(
    case: Case, layout: str, direction: str, ours: float, stock: float = 10.0
) -> Row:
    seconds = {"floor": 1.0, "stock": stock, "ours": ours}
    return Row(case, layout, direction, seconds, {}, {})


def missed(rows: list[Row]) -> set[str]:
    return {check.target for check in _targets.check_times(rows) if not check.held}


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
    name = f"{'MLA' if layout == MLA else 'HND'} {direction}"
    assert not missed([row(case, layout, direction, most)])
    assert missed([row(case, layout, direction, most + 0.01)]) == {name}
    assert not missed([row(case, layout, direction, most, stock=least * most)])
    slower = row(case, layout, direction, most, stock=(least - 0.01) * most)
    assert missed([slower]) == {name}


def test_never_slower_than_stock_with_many_threads() -> None:
    case = Case("Qwen3-1.7B", 128, 2, 1, threads=4)
    assert not missed([row(case, KV_FIRST, "gather", 5.0, stock=5.0)])
    assert missed([row(case, KV_FIRST, "gather", 5.0, stock=4.9)]) == {"any row"}


def test_one_small_block() -> None:
    case = Case("Qwen3-1.7B", 128, 1, 1)
    assert "one 128-token block" in missed(
        [row(case, KV_FIRST, "scatter", 1.0, stock=1.29)]
    )
    assert "one 128-token block" not in missed(
        [row(case, KV_FIRST, "scatter", 1.0, stock=1.3)]
    )


def test_a_row_without_times_is_a_miss() -> None:
    broken = Row(LARGE, KV_FIRST, "gather", {}, {}, {"stock": "refused"})
    (check,) = _targets.check_times([broken])
    assert not check.held
    assert "refused" in check.got


def counted(case: Case, layout: str, descriptors: int, seconds: float = 0.0) -> Row:
    copies = Copies(descriptors, descriptors, 0, seconds)
    return Row(case, layout, "gather", {}, {"ours": copies}, {})


@pytest.mark.parametrize(("layout", "limit"), [(BLOCKS_FIRST, 1), (KV_FIRST, 2)])
@pytest.mark.parametrize("adjacent", [True, False])
def test_descriptors(layout: str, limit: int, adjacent: bool) -> None:
    case = Case("Qwen3-1.7B", 128, 8, 4, adjacent=adjacent)
    most = 28 * limit * (2 if adjacent else 8)
    (good,) = _targets.check_descriptors([counted(case, layout, most)])
    (bad,) = _targets.check_descriptors([counted(case, layout, most + 28)])
    assert (good.held, bad.held) == (True, False)


def test_modelled_time() -> None:
    wire = LARGE.bytes / 58e9
    for seconds, held in ((1.5 * wire, True), (1.52 * wire, False)):
        (check,) = _targets.check_modelled([counted(LARGE, KV_FIRST, 1, seconds)])
        assert check.held is held


def test_modelled_time_of_small_blocks_is_that_of_the_cheaper_way() -> None:
    # One head: 64 KiB of K and V take a microsecond, their descriptor 17.
    case = Case("Llama-3.1-70B TP8", 128, 4, 4)
    direct = _targets.direct_seconds(case, BLOCKS_FIRST)
    staged = _targets.staged_seconds(case)
    assert staged < direct
    checks = [
        _targets.check_modelled([counted(case, BLOCKS_FIRST, 1, seconds)])[0].held
        for seconds in (staged, direct)
    ]
    assert checks == [True, False]


def test_nothing_counted_is_not_judged() -> None:
    bare = row(LARGE, KV_FIRST, "gather", 1.0)
    assert _targets.check_descriptors([bare]) == []
    assert _targets.check_modelled([bare]) == []


def test_staging_is_judged_for_ours() -> None:
    staging = {"ours, 1 threads": 64.0, "ours, 8 threads": 64.1, "stock": 900.0}
    held = [check.held for check in _targets.check_staging(staging)]
    assert held == [True, False]


def test_stores_and_restores_on_the_engines_thread() -> None:
    stores, restores = {"shm": 1.0, "pickle": 1.01}, {"shm": 0.3, "pickle": 0.31}
    held = [c.held for c in _targets.check_engine_time(stores, restores)]
    assert held == [True, False] * 2
