# SPDX-License-Identifier: Apache-2.0
"""Sequences in a paged cache, and plain attention over their contiguous K and V."""

# Standard
from dataclasses import dataclass

# Third Party
import pytest
import torch

# Both sides accumulate in float64 and round once: at most one unit apart.
TOLERANCE = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 2**-22}
HEADS, SIZE, BLOCK = 2, 32, 8


@dataclass
class Case:
    """Sequences with a history, their new tokens, and an unordered paged cache.

    ``history[i]`` is ``[2, start + L, H, D]``: keys and values of sequence i, of
    which the last L are new. Cache rows that no history covers hold NaN, so that
    reading one shows.
    """

    q: torch.Tensor
    history: list[torch.Tensor]
    starts: list[int]
    tables: torch.Tensor
    kv: torch.Tensor  # [NB, 2, H, 1, BS, D]

    @property
    def length(self) -> int:
        return self.q.shape[3]

    def new(self, plane: int) -> torch.Tensor:
        rows = [h[plane, -self.length :].transpose(0, 1) for h in self.history]
        return torch.stack(rows).unsqueeze(2)

    def seq_idx(self) -> torch.Tensor:
        return torch.tensor(self.starts).unsqueeze(1)

    def slots(self, index: int, first: int) -> list[tuple[int, int]]:
        end = self.history[index].shape[1]
        row = self.tables[index].tolist()
        return [(row[p // BLOCK], p % BLOCK) for p in range(first, end)]

    def expected_cache(self) -> torch.Tensor:
        kv = self.kv.clone()
        for i, rows in enumerate(self.history):
            for (block, offset), row in zip(
                self.slots(i, 0), rows.transpose(0, 1), strict=True
            ):
                kv[block, :, :, 0, offset] = row
        return kv


def make_case(
    starts: list[int], length: int, groups: int, dtype: torch.dtype, seed: int = 0
) -> Case:
    gen = torch.Generator().manual_seed(seed)
    blocks = max(start + length for start in starts) // BLOCK + 2
    count = len(starts) * blocks + 3
    ids = torch.randperm(count, generator=gen)[: len(starts) * blocks]
    case = Case(
        q=torch.randn(len(starts), HEADS, groups, length, SIZE, generator=gen).to(
            dtype
        ),
        history=[
            torch.randn(2, start + length, HEADS, SIZE, generator=gen).to(dtype)
            for start in starts
        ],
        starts=starts,
        tables=ids.reshape(len(starts), blocks).to(torch.int32),
        kv=torch.full((count, 2, HEADS, 1, BLOCK, SIZE), torch.nan, dtype=dtype),
    )
    for i, start in enumerate(starts):
        for (block, offset), row in zip(
            case.slots(i, 0)[:start], case.history[i].transpose(0, 1), strict=False
        ):
            case.kv[block, :, :, 0, offset] = row
    return case


def dense_attention(
    case: Case, scale: float, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """``[B, H, G, L, D]`` by torch's own attention in float64, head by head."""
    out = torch.empty_like(case.q)
    for i, start in enumerate(case.starts):
        keys, values = case.history[i].double()
        seen = torch.ones(case.length, len(keys)).tril(start).bool()
        if mask is not None:
            seen = mask[i, 0, 0, :, : len(keys)] > 0
        for head in range(HEADS):
            for group in range(case.q.shape[2]):
                out[i, head, group] = torch.nn.functional.scaled_dot_product_attention(
                    case.q[i, head, group].double(),
                    keys[:, head],
                    values[:, head],
                    attn_mask=seen,
                    scale=scale,
                ).to(case.q.dtype)
    return out


def check(case: Case, out: torch.Tensor, kv: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(out.cpu(), want, rtol=tolerance, atol=tolerance / 8)
    # Bytes, since the rest of the cache is NaN.
    assert torch.equal(
        kv.cpu().contiguous().view(torch.uint8), case.expected_cache().view(torch.uint8)
    )


BATCHES = pytest.mark.parametrize(
    ("starts", "length"),
    [
        pytest.param([0], 5, id="prefill-within-a-block"),
        pytest.param([0], 8, id="prefill-one-whole-block"),
        pytest.param([16], 13, id="prefill-continues-at-a-block"),
        pytest.param([11], 17, id="prefill-continues-inside-a-block"),
        pytest.param([0, 7, 8, 9, 30], 1, id="decode-five-sequences"),
    ],
)
