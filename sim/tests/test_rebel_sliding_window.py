# SPDX-License-Identifier: Apache-2.0
"""Attention with a sliding window against plain attention with a mask of the window."""

# Third Party
import pytest
import torch
from torch.nn.functional import pad

pytest.importorskip("rebel._device", reason="tests the simulator itself")

# Third Party
from rebel.ops.torch_custom_ops.attn import custom_kernel

# First Party
from sim.tests.attention_reference import (
    BATCHES,
    BLOCK,
    HEADS,
    SIZE,
    TOLERANCE,
    Case,
    check,
    dense_attention,
    make_case,
)

pytestmark = pytest.mark.sim

OPS = torch.ops.rbln_custom_ops
PADDING = 2
SCALE = torch.tensor(SIZE**-0.5)
WHERE = pytest.mark.parametrize(
    ("dtype", "device"), [(torch.float16, "cpu"), (torch.bfloat16, "rbln:0")]
)


def mask_of(case: Case, window: int) -> torch.Tensor:
    """``[B, 1, 1, L, C]``: of what came before, each query sees the last ones."""
    longest = max(rows.shape[1] for rows in case.history)
    mask = torch.zeros(len(case.starts), 1, 1, case.length, longest)
    for i, start in enumerate(case.starts):
        for query in range(case.length):
            end = start + query + 1
            mask[i, 0, 0, query, max(0, end - window) : end] = 1
    return mask


def forget_passed(case: Case, window: int) -> None:
    """Make tokens NaN that the window has passed, and their blocks the null block."""
    for i, start in enumerate(case.starts):
        passed = max(0, start - window + 1)
        for block, offset in case.slots(i, 0)[:passed]:
            case.kv[block, :, :, 0, offset] = torch.nan
        case.history[i][:, :passed] = torch.nan
        case.tables[i, : passed // BLOCK] = 0


def with_null_block(case: Case) -> Case:
    """Put a block 0 that no sequence has in front of all others."""
    null = torch.full_like(case.kv[:1], torch.nan)
    case.kv, case.tables = torch.cat([null, case.kv]), case.tables + 1
    return case


@WHERE
@pytest.mark.parametrize("window", [1, 5, BLOCK, 2 * BLOCK + 3, 1000])
@BATCHES
def test_several_blocks(
    starts: list[int], length: int, window: int, dtype: torch.dtype, device: str
) -> None:
    case = with_null_block(make_case(starts, length, 3, dtype))
    want = dense_attention(case, float(SCALE), mask_of(case, window))
    forget_passed(case, window)
    kv = case.kv.to(device)
    tables = case.tables[0] if len(starts) == 1 else case.tables
    out = OPS.sliding_window_attention_v1(
        *(rows.to(device) for rows in (case.q, case.new(0), case.new(1))),
        *(kv, case.seq_idx().to(device), SCALE.to(device), tables.to(device)),
        *(window, True, None, None),
    )
    check(case, out, kv, want)


def test_several_blocks_cut_anywhere_give_the_same_bits() -> None:
    case = make_case([0], 40, 2, torch.bfloat16)
    args = (case.q, case.new(0), case.new(1))

    def run(cuts: list[int]) -> torch.Tensor:
        kv, parts = case.kv.clone(), []
        for first, last in zip(cuts, cuts[1:], strict=False):
            piece = (rows[:, :, :, first:last] for rows in args)
            start = torch.tensor([[first]])
            parts.append(
                OPS.sliding_window_attention_v1(
                    *piece, kv, start, SCALE, case.tables[0], 11, True, None, None
                )
            )
        return torch.cat(parts, 3)

    assert torch.equal(run([0, 40]), run([0, 16, 35, 36, 40]))


def shift_in(
    case: Case, window: int, pieces: list[int], device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Feed sequences from their first token on, all together in a decode.

    A prefill has tokens behind its own, and a decode sequences, that only pad.

    Args:
        case: Of sequences that start at 0.
        window: Tokens of a block.
        pieces: New tokens of each call; one of one token is a decode.
        device: Where the cache is.

    Returns:
        What every token got, like ``case.q``, and the cache.
    """
    kv = torch.full((5, 2, HEADS, 1, window, SIZE), torch.nan, dtype=case.q.dtype)
    kv = kv.to(device)
    count = len(case.starts)
    blocks = torch.tensor([[3], [1]])[:count]
    rows = [case.q, case.new(0), case.new(1)]
    out, first = torch.empty_like(case.q), 0
    for length in pieces:
        last = first + length
        held = torch.full((count, 1), min(first, window))
        numbers, new = [held, held + length], [r[:, :, :, first:last] for r in rows]
        if length > 1:
            # Behind the tokens, and one sequence a call.
            new = [pad(r, (0, 0, 0, PADDING), value=torch.inf) for r in new]
            op = OPS.sliding_window_attention_naive_prefill
            parts = [slice(i, i + 1) for i in range(count)]
            tables = list(blocks)
        else:
            # Behind the sequences: block 0, and no token.
            behind = (0, 0, 0, PADDING)
            new = [pad(r, (0, 0) * 4 + (0, PADDING), value=torch.inf) for r in new]
            numbers = [pad(n, behind) for n in numbers]
            op = OPS.sliding_window_attention_naive_decode
            parts, tables = [slice(None)], [pad(blocks, behind)]
        got = []
        for part, table in zip(parts, tables, strict=True):
            args = [*(r[part] for r in new), kv, *(n[part] for n in numbers)]
            args += [SCALE, table, SCALE]
            got.append(op(*(a.to(device) for a in args)).cpu())
        out[:, :, :, first:last] = torch.cat(got)[:count, :, :, :length]
        first = last
    return out, kv.cpu()


@WHERE
@pytest.mark.parametrize("window", [1, 4, 64])
@pytest.mark.parametrize(
    "pieces",
    [[1, 1, 1, 1, 1, 1], [7, 1, 1, 1], [3, 5, 2, 1, 9], [16, 1, 1]],
    ids=["decodes", "one-prefill", "prefills-and-decodes", "longer-than-windows"],
)
def test_one_block_that_shifts(
    pieces: list[int], window: int, dtype: torch.dtype, device: str
) -> None:
    case = make_case([0, 0], sum(pieces), 3, dtype)
    want = dense_attention(case, float(SCALE), mask_of(case, window))

    out, kv = shift_in(case, window, pieces, device)

    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance / 8)
    for block, history in zip((3, 1), case.history, strict=True):
        last = history[:, -window:].transpose(1, 2)
        assert torch.equal(kv[block, :, :, 0, : last.shape[2]], last)
        kv[block] = torch.nan
    assert torch.isnan(kv).all(), "another block was written"


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_custom_kernel_is_the_same_over_a_kv_first_cache(phase: str) -> None:
    case = make_case([0, 0] if phase == "decode" else [0], 1, 2, torch.float16)
    held = torch.full((len(case.starts), 1), 3)
    table = torch.tensor([[2], [0]])[: len(case.starts)]
    kv = torch.randn(3, 2, HEADS, 1, 4, SIZE).half()
    first = kv.transpose(0, 1).contiguous()
    name = f"sliding_window_attention_naive_{phase}"
    new, rest = (case.q, case.new(0), case.new(1)), (held, held + 1, SCALE, table)
    want = getattr(OPS, name)(*new, kv, *rest, SCALE)
    out = custom_kernel(name)(*new, first, *rest, SCALE)
    assert torch.equal(out, want)
    assert torch.equal(first.transpose(0, 1), kv)


def test_sinks_take_probability_from_what_the_window_shows() -> None:
    # Equal scores: each of T keys gets 1 / (T + exp(sink - score)).
    case = make_case([0], 6, 2, torch.float32)
    case.q.zero_()
    sinks = torch.tensor([[-1.0], [0.0], [0.5], [2.0]])
    total = case.history[0][1, -4:].double().sum(0)  # [H, D]
    share = 1 / (4 + sinks.double().exp())  # [H * G, 1]
    want = (total.repeat_interleave(2, 0) * share).reshape(HEADS, 2, SIZE).float()
    new, table = (case.q, case.new(0), case.new(1)), case.tables[0]
    paged = OPS.sliding_window_attention_v1(
        *(*new, case.kv, case.seq_idx(), SCALE, table, 4, True, None, sinks)
    )
    kv = torch.full((1, 2, HEADS, 1, 4, SIZE), torch.nan)
    zero, six = torch.tensor([[0]]), torch.tensor([[6]])
    shifted = OPS.sliding_window_attention_naive_prefill(
        *(*new, kv, zero, six, SCALE, torch.tensor([0]), SCALE, sinks)
    )
    for out in (paged, shifted):
        torch.testing.assert_close(out[0, :, :, -1], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"held": 5}, r"cache_seq_len must be in 0\.\.4 \(block size\), got 5"),
        ({"held": -1}, "cache_seq_len must be in"),
        ({"end": 1}, r"cache_offset must be in 2\.\.5, got 1"),
        ({"end": 6}, r"cache_offset must be in 2\.\.5, got 6"),
        ({"block": 9}, r"block ids must be in 0\.\.2"),
    ],
)
def test_a_bad_shift_is_refused_before_a_byte_is_written(
    change: dict[str, int], message: str
) -> None:
    case = make_case([0], 3, 1, torch.float16)
    given = {"held": 2, "end": 5, "block": 1} | change
    held, end, block = (torch.tensor([given[name]]) for name in given)
    kv = torch.zeros(3, 2, HEADS, 1, 4, SIZE).half()
    with pytest.raises(ValueError, match=message) as error:
        OPS.sliding_window_attention_naive_prefill(
            *(case.q, case.new(0), case.new(1), kv, held, end, SCALE, block, SCALE)
        )
    assert "rbln_custom_ops.sliding_window_attention_naive_prefill" in str(error.value)
    assert not kv.any()


def test_windows_of_several_blocks_that_are_refused() -> None:
    case = make_case([0], 3, 1, torch.float16)
    new = (case.q, case.new(0), case.new(1))
    rest = (case.kv, case.seq_idx(), SCALE, case.tables[0])
    op = OPS.sliding_window_attention_v1
    with pytest.raises(ValueError, match="window_size must be at least 1, got 0"):
        op(*new, *rest, 0, True, None, None)
    for causal, mask in ((False, None), (True, SCALE)):
        with pytest.raises(
            NotImplementedError, match="window_attention_v1 that is not"
        ):
            op(*new, *rest, 4, causal, mask, None)
