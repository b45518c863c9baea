# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.rbln``: the sampling operators of vllm-rbln 0.12."""

import torch

from ..._random import generator
from ..._unsupported import missing_attribute
from .._register import define

_LIBRARY = torch.library.Library("rbln", "FRAGMENT")


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    # Of equal logits the lowest index, whatever the batch.
    return torch.argmax(logits, dim=-1).to(torch.int32)


def _top_k_top_p(
    probs: torch.Tensor, k: torch.Tensor | None = None, p: torch.Tensor | None = None
) -> torch.Tensor:
    """Draw one token a row from its k most probable whose sum reaches p."""
    # Stable, so that k = 1 picks what argmax picks.
    ordered, tokens = probs.double().sort(dim=-1, descending=True, stable=True)
    if k is not None:
        rank = torch.arange(ordered.shape[-1])
        ordered = ordered.masked_fill(rank >= k.long().clamp(min=1)[:, None], 0.0)
    if p is not None:
        before = ordered.cumsum(dim=-1) - ordered
        drop = before >= p.double()[:, None]
        drop[:, 0] = False
        ordered = ordered.masked_fill(drop, 0.0)
    pick = torch.multinomial(ordered, 1, generator=generator)
    return tokens.gather(-1, pick).squeeze(-1).to(torch.int32)


def _one_per_row(rows: torch.Tensor, *rest: object) -> torch.Tensor:
    return rows.new_empty(rows.shape[:-1], dtype=torch.int32)


define(_LIBRARY, "argmax(Tensor logits) -> Tensor", _argmax, _one_per_row)
define(
    _LIBRARY,
    "top_k_top_p(Tensor probs, Tensor? k=None, Tensor? p=None) -> Tensor",
    _top_k_top_p,
    _one_per_row,
)

__getattr__ = missing_attribute("rebel.ops.torch_custom_ops.sampling")
