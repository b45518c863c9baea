# SPDX-License-Identifier: Apache-2.0
"""Paged attention against plain attention on contiguous tensors."""

# Third Party
import pytest
import torch

pytest.importorskip("rebel._device", reason="tests the simulator itself")

# Third Party
from rebel.ops.torch_custom_ops.attn import custom_kernel

# First Party
from sim.tests.attention_reference import (
    BATCHES,
    BLOCK,
    HEADS,
    SIZE,
    check,
    dense_attention,
    make_case,
)

pytestmark = pytest.mark.sim

OPS = torch.ops.rbln_custom_ops


@pytest.mark.parametrize("device", ["cpu", "rbln:0"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("groups", [1, 3])
@BATCHES
def test_flash_causal(
    starts: list[int], length: int, groups: int, dtype: torch.dtype, device: str
) -> None:
    case = make_case(starts, length, groups, dtype)
    prefill = len(starts) == 1
    op = getattr(
        OPS, f"flash_causal_attention_naive_{'prefill' if prefill else 'decode'}"
    )
    tables = case.tables[0] if prefill else case.tables
    scale = torch.tensor(SIZE**-0.5)
    kv = case.kv.to(device)
    args = [case.q, case.new(0), case.new(1)]
    rest = [scale, case.seq_idx(), tables, scale]
    out = op(*(a.to(device) for a in args), kv, *(a.to(device) for a in rest))
    assert out.device == torch.device(device)
    check(case, out, kv, dense_attention(case, SIZE**-0.5))


@pytest.mark.parametrize("groups", [1, 4])
@BATCHES
def test_custom_kernel_is_the_same_over_a_kv_first_cache(
    starts: list[int], length: int, groups: int
) -> None:
    case = make_case(starts, length, groups, torch.float16)
    phase = "prefill" if len(starts) == 1 else "decode"
    scale = torch.tensor(0.25)
    kv = case.kv.transpose(0, 1).contiguous()
    out = custom_kernel(f"flash_causal_attention_naive_{phase}")(
        case.q, case.new(0), case.new(1), kv, scale, case.seq_idx(), case.tables, scale
    )
    check(case, out, kv.transpose(0, 1), dense_attention(case, 0.25))


@pytest.mark.parametrize("traced", [False, True], ids=["run", "traced"])
def test_a_result_is_laid_out_as_the_queries_are(traced: bool) -> None:
    """vllm-rbln views several tokens a sequence (drafts) as [tokens, heads, size]."""
    batch, length, groups = 4, 3, 2
    tokens = (batch * length, HEADS * groups, SIZE)
    case = make_case([5, 9, 0, 12], length, groups, torch.float32)
    # As its projections leave them: token-major.
    rows = case.q.reshape(batch, HEADS * groups, length, SIZE).transpose(1, 2)
    want = dense_attention(case, 0.5)
    case.q = rows.contiguous().transpose(1, 2).view(case.q.shape)
    scale = torch.tensor(0.5)

    def layer(q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        out = OPS.flash_causal_attention_naive_decode(q, *rest)
        heads = out.view(batch, HEADS * groups, length, SIZE).transpose(1, 2)
        return heads.view(tokens)

    run = torch.compile(layer, backend="rbln", fullgraph=True) if traced else layer
    args = (case.q, case.new(0), case.new(1), case.kv, scale)
    got = run(*args, case.seq_idx(), case.tables, scale)
    heads = got.view(batch, length, HEADS * groups, SIZE).transpose(1, 2)
    torch.testing.assert_close(heads.reshape(want.shape), want, rtol=2**-22, atol=1e-7)


def test_two_blocks_leave_no_doubt_about_the_layout() -> None:
    # [2, 2, ...]: only the operator says which dimension is which.
    case = make_case([0], 8, 1, torch.float16)
    case.tables = torch.tensor([[1, 0]], dtype=torch.int32)
    case.kv = case.kv[:2].clone()
    scale = torch.tensor(1.0)
    want = dense_attention(case, 1.0)
    new, rest = (case.q, case.new(0), case.new(1)), (scale, case.seq_idx())
    kv = case.kv.clone()
    op = OPS.flash_causal_attention_naive_prefill
    check(case, op(*new, kv, *rest, case.tables[0], scale), kv, want)
    kv = case.kv.transpose(0, 1).contiguous()
    kernel = custom_kernel("flash_causal_attention_naive_prefill")
    out = kernel(*new, kv, *rest, case.tables[0], scale)
    check(case, out, kv.transpose(0, 1), want)


@BATCHES
def test_causal_over_one_block_takes_arguments_in_its_own_order(
    starts: list[int], length: int
) -> None:
    case = make_case(starts, length, 2, torch.float16)
    phase = "prefill" if len(starts) == 1 else "decode"
    scale = torch.tensor(0.2)
    op = getattr(OPS, f"causal_attention_naive_{phase}")
    args = (case.q, case.new(0), case.new(1))
    kv = case.kv.clone()
    out = op(*args, kv, case.seq_idx(), scale, case.tables, scale)
    check(case, out, kv, dense_attention(case, 0.2))


@pytest.mark.parametrize("name", ["attention_naive", "flash_attention_naive"])
@BATCHES
def test_mask_replaces_causality(name: str, starts: list[int], length: int) -> None:
    case = make_case(starts, length, 2, torch.float16)
    gen = torch.Generator().manual_seed(1)
    width = case.tables.shape[1] * BLOCK
    mask = (torch.rand(len(starts), 1, 1, length, width, generator=gen) > 0.5).float()
    mask[..., 0] = 1.0  # every query sees something
    phase = "prefill" if len(starts) == 1 else "decode"
    scale = torch.tensor(0.3)
    order = (case.seq_idx(), scale)
    kv = case.kv.clone()
    out = getattr(OPS, f"{name}_{phase}")(
        *(case.q, case.new(0), case.new(1), kv, mask),
        *(order if name == "attention_naive" else reversed(order)),
        *(case.tables, scale),
    )
    check(case, out, kv, dense_attention(case, 0.3, mask))


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    case = make_case([3], 2, 1, torch.float16)
    mask = torch.zeros(1, 1, 1, 2, case.tables.shape[1] * BLOCK)
    scale = torch.tensor(1.0)
    out = OPS.attention_naive_prefill(
        *(case.q, case.new(0), case.new(1), case.kv, mask),
        *(case.seq_idx(), scale, case.tables[0], scale),
    )
    assert torch.equal(out, torch.zeros_like(out))


def test_sinks_take_probability_from_every_key() -> None:
    # Equal scores: each of T keys gets 1 / (T + exp(sink - score)).
    case = make_case([2], 1, 2, torch.float32)
    case.q.zero_()
    sinks = torch.tensor([[-1.0], [0.0], [0.5], [2.0]])
    scale = torch.tensor(1.0)
    out = OPS.flash_causal_attention_naive_decode(
        *(case.q, case.new(0), case.new(1), case.kv, scale, case.seq_idx()),
        *(case.tables, scale, sinks),
    )
    total = case.history[0][1].double().sum(0)  # [H, D]
    share = 1 / (3 + sinks.double().exp())  # [H * G, 1]
    want = (total.repeat_interleave(2, 0) * share).reshape(out.shape).float()
    torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)


def test_a_padded_tail_that_overruns_the_table_is_dropped() -> None:
    case = make_case([12], 4, 1, torch.float16)
    case.tables = case.tables[:, :2]
    padding = torch.full((1, HEADS, 1, 5, SIZE), 9.0, dtype=torch.float16)
    q = torch.cat([case.q, padding], 3)
    k, v = (torch.cat([case.new(plane), padding], 3) for plane in (0, 1))
    scale = torch.tensor(0.2)
    kv = case.kv.clone()
    out = OPS.flash_causal_attention_naive_prefill(
        q, k, v, kv, scale, case.seq_idx(), case.tables[0], scale
    )
    check(case, out[:, :, :, :4], kv, dense_attention(case, 0.2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_do_not_depend_on_the_batch_or_on_how_a_prompt_is_cut(
    dtype: torch.dtype,
) -> None:
    case = make_case([0, 21, 40], 1, 2, dtype)
    scale = torch.tensor(SIZE**-0.5)
    decode = OPS.flash_causal_attention_naive_decode
    args = (case.q, case.new(0), case.new(1))
    together = decode(*args, case.kv.clone(), scale, case.seq_idx(), case.tables, scale)
    for i in range(3):
        alone = decode(
            *(a[i : i + 1] for a in args),
            *(case.kv.clone(), scale, case.seq_idx()[i : i + 1]),
            *(case.tables[i : i + 1], scale),
        )
        assert torch.equal(alone[0], together[i])
    whole = make_case([0], 40, 2, dtype, seed=2)
    prefill = OPS.flash_causal_attention_naive_prefill
    args = (whole.q, whole.new(0), whole.new(1))
    table = whole.tables[0]
    at_once = prefill(*args, whole.kv.clone(), scale, whole.seq_idx(), table, scale)
    kv, parts = whole.kv.clone(), []
    for first, last in ((0, 16), (16, 35), (35, 40)):
        piece = (a[:, :, :, first:last] for a in args)
        start = torch.tensor([[first]])
        parts.append(prefill(*piece, kv, scale, start, table, scale))
    assert torch.equal(torch.cat(parts, 3), at_once)


def make_mla(starts: list[int], length: int) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(3)
    blocks = max(starts) // BLOCK + 3
    count = len(starts) * blocks + 2
    order = torch.randperm(count, generator=gen)[: len(starts) * blocks]
    size, total = 512 + 64, max(starts) + length
    return {
        "q": torch.randn(len(starts), 3, length, size, generator=gen).half(),
        "rows": torch.randn(len(starts), total, size, generator=gen).half(),
        "cache": torch.full((count, BLOCK, size), torch.nan).half(),
        "tables": order.reshape(len(starts), blocks).to(torch.int32),
    }


@pytest.mark.parametrize("device", ["cpu", "rbln:0"])
@BATCHES
def test_mla(starts: list[int], length: int, device: str) -> None:
    case = make_mla(starts, length)
    cache, rows, tables = case["cache"], case["rows"], case["tables"]
    want_cache = cache.clone()
    want = torch.empty(len(starts), 3, length, 512, dtype=torch.float16)
    for i, start in enumerate(starts):
        for position in range(start + length):
            slot = tables[i, position // BLOCK], position % BLOCK
            want_cache[slot] = rows[i, position]
            if position < start:
                cache[slot] = rows[i, position]
        known = rows[i, : start + length].double()
        want[i] = torch.nn.functional.scaled_dot_product_attention(
            case["q"][i].double(),
            known.expand(3, -1, -1),
            known[:, :512].expand(3, -1, -1),
            attn_mask=torch.ones(length, start + length).tril(start).bool(),
            scale=0.1,
        )
    new = torch.stack([rows[i, s : s + length] for i, s in enumerate(starts)])
    prefill = len(starts) == 1
    op = OPS.paged_flash_causal_mla_naive_decode
    if prefill:
        op, tables = OPS.paged_flash_causal_mla_naive_prefill, tables[0]
    cache = cache.to(device)
    inputs = (case["q"], new[..., :512], new[..., 512:].unsqueeze(2))
    rest = (torch.tensor(starts).unsqueeze(1), tables, torch.tensor(0.1))
    out = op(*(a.to(device) for a in inputs), cache, *(a.to(device) for a in rest))
    torch.testing.assert_close(out.cpu(), want, rtol=2**-10, atol=2**-13)
    assert torch.equal(cache.cpu().view(torch.uint8), want_cache.view(torch.uint8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv": torch.zeros(2, 6, 2, 1, 8, 32).half()}, r"\[NB, 2, H, 1, BS, D\]"),
        ({"seq": torch.tensor([[80]])}, r"seq_idx must be in 0\.\.31 .*got 80"),
        ({"seq": torch.tensor([[-1]])}, "seq_idx must be in"),
        ({"seq": torch.zeros(1, 4).int()}, r"seq_idx must be \[1, 1\]"),
        ({"table": torch.tensor([0, 1, 2, 99])}, r"block ids must be in 0\.\.\d+"),
        ({"table": torch.tensor([0, -1, 2, 3])}, "block ids must be in"),
        ({"table": torch.zeros(2, 4).int()}, "block_tables must be"),
        ({"k": torch.zeros(1, 2, 1, 3, 32).half()}, "k must be"),
        ({"q": torch.zeros(1, 2, 1, 5, 16).half()}, "q must be"),
    ],
)
def test_bad_input_is_refused_before_a_byte_is_written(
    change: dict[str, torch.Tensor], message: str
) -> None:
    case = make_case([0], 5, 1, torch.float16)
    scale = torch.tensor(1.0)
    named = {"q": case.q, "k": case.new(0), "v": case.new(1), "kv": case.kv.clone()}
    named |= {"seq": case.seq_idx(), "table": torch.arange(4)} | change
    before = named["kv"].clone()
    with pytest.raises(ValueError, match=message) as error:
        OPS.flash_causal_attention_naive_prefill(
            *(named[name] for name in ("q", "k", "v", "kv")),
            *(scale, named["seq"], named["table"], scale),
        )
    assert "rbln_custom_ops.flash_causal_attention_naive_prefill" in str(error.value)
    assert torch.equal(named["kv"].view(torch.uint8), before.view(torch.uint8))


def test_what_is_not_simulated_says_so_by_name() -> None:
    case = make_case([0], 1, 1, torch.float16)
    scale, idx = torch.tensor(1.0), case.seq_idx()
    qkv = (case.q, case.new(0), case.new(1), case.kv)
    with pytest.raises(NotImplementedError, match="float8_e4m3fn KV cache"):
        OPS.flash_causal_attention_naive_decode(
            *(*qkv, scale, idx, case.tables, scale, None, scale, scale),
            torch.float8_e4m3fn,
        )
    with pytest.raises(NotImplementedError, match="rbln_triton_ops.other_prefill"):
        custom_kernel("other_prefill")
