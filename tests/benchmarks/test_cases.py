# SPDX-License-Identifier: Apache-2.0
"""What the block transfer benchmark measures."""

# Third Party
import pytest

# First Party
from benchmarks._cases import MODELS, Case, Row, matrix, selection
from benchmarks.block_transfer import choose, costed, main, parse_arguments


@pytest.mark.parametrize(
    ("case", "size"),
    [
        (Case("Qwen3-1.7B", 1024, 1, 1), 28 * 2 * 8 * 128 * 1024 * 2),
        (Case("Llama-3.1-70B TP8", 128, 4, 4, dtype="fp8"), 80 * 2 * 128 * 512),
        (Case("DeepSeek-V3", 256, 2, 1), 61 * 576 * 512 * 2),
    ],
)
def test_bytes_of_a_call(case: Case, size: int) -> None:
    assert case.bytes == size
    assert case.footprint > 3 * size


@pytest.mark.parametrize("adjacent", [True, False])
def test_threads_move_different_blocks_and_one_stays(adjacent: bool) -> None:
    case = Case("Qwen3-1.7B", 128, 4, 2, threads=3, adjacent=adjacent)
    ids = [case.block_ids(thread) for thread in range(3)]
    assert sorted(sum(ids, [])) == list(range(case.pool_blocks - 1))
    for own in ids:
        follows = [b == a + 1 for a, b in zip(own, own[1:], strict=False)]
        assert all(follows) if adjacent else not any(follows)


def test_blocks_are_whole_chunks() -> None:
    with pytest.raises(ValueError, match="no whole number of chunks"):
        Case("Qwen3-1.7B", 128, 3, 2)


def test_the_matrix_has_every_combination() -> None:
    cases = list(matrix())
    assert len(set(cases)) == len(cases) == len(MODELS) * 3 * 4 * 2 * 2
    assert {case.model for case in selection()} == set(MODELS)


def test_only_and_the_memory_limit_choose() -> None:
    chosen, too_large = choose(parse_arguments(["--only", "Qwen3", "--max-gib", "0.5"]))
    assert chosen
    assert too_large
    assert all("Qwen3" in str(case) for case in chosen + too_large)
    assert (
        max(c.footprint for c in chosen) <= 2**29 < min(c.footprint for c in too_large)
    )
    everything, _ = choose(parse_arguments(["--matrix", "--max-gib", "9999"]))
    assert everything == list(matrix())
    assert all(c.threads == 1 and not c.adjacent for c in costed(everything))


def test_no_case_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--rounds", "0"])
    with pytest.raises(SystemExit):
        main(["--torch-threads", "0"])
    assert "must be positive" in capsys.readouterr().err


def test_ratios_need_both() -> None:
    case = Case("Qwen3-1.7B", 128, 1, 1)
    row = Row(case, "K/V-first", "gather", {"ours": 3.0, "floor": 2.0}, {}, {})
    assert row.ratio("ours", "floor") == 1.5
    assert row.ratio("stock", "ours") is None
    assert row.as_json()["gb_per_s"]["floor"] == case.bytes / 2e9
