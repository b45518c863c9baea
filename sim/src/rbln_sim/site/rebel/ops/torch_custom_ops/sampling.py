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


def _kept(
    probs: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's k most probable tokens whose sum reaches p, the first one for sure.

    Args:
        probs: ``[rows, vocabulary]``.
        k: ``[rows]``, or None for all.
        p: ``[rows]``, or None for all.

    Returns:
        Probabilities in float64, 0 for what is left out, and the tokens they belong
        to: both ``[rows, vocabulary]`` in falling order of probability.
    """
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
    return ordered, tokens


def _top_k_top_p(
    probs: torch.Tensor, k: torch.Tensor | None = None, p: torch.Tensor | None = None
) -> torch.Tensor:
    """Draw one token a row from its k most probable whose sum reaches p."""
    ordered, tokens = _kept(probs, k, p)
    pick = torch.multinomial(ordered, 1, generator=generator)
    return tokens.gather(-1, pick).squeeze(-1).to(torch.int32)


def _rejection_sample(
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    k: torch.Tensor | None = None,
    p: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept each sequence's draft tokens up to the first that the target rejects.

    The drafts are certain (n-grams): one is accepted with the target's probability of
    it, and where it is rejected, another token is drawn from what is left.

    Args:
        draft_token_ids: Packed, padded at the end: ``[B * K]``.
        target_probs: A row for each: ``[B * K, vocabulary]``.
        cu_num_draft_tokens: Where each sequence's drafts end: ``[B]``.
        k: As for ``top_k_top_p``, for each sequence: ``[B]``.
        p: Likewise.

    Returns:
        ``[B, K]``: the token drawn in place of the rejected one, at its position, 0
        elsewhere; and ``[B]``: how many were accepted. Both int32.
    """
    batch = cu_num_draft_tokens.shape[0]
    recovered = torch.zeros(
        (batch, draft_token_ids.shape[0] // batch), dtype=torch.int32
    )
    accepted = torch.zeros(batch, dtype=torch.int32)
    drafts: list[int] = draft_token_ids.tolist()
    begin = 0
    for row, end in enumerate(cu_num_draft_tokens.tolist()):
        limits = [x if x is None else x[row].expand(end - begin) for x in (k, p)]
        ordered, tokens = _kept(target_probs[begin:end], *limits)
        probs = torch.zeros_like(ordered).scatter(-1, tokens, ordered)
        for position, draft in enumerate(drafts[begin:end]):
            left = probs[position]
            # In [0, 1): what is certain is always accepted.
            chance = torch.rand((), dtype=left.dtype, generator=generator)
            if chance * left.sum() < left[draft]:
                accepted[row] += 1
                continue
            left[draft] = 0.0
            recovered[row, position] = torch.multinomial(left, 1, generator=generator)
            break
        begin = end
    return recovered, accepted


def _one_per_row(rows: torch.Tensor, *rest: object) -> torch.Tensor:
    return rows.new_empty(rows.shape[:-1], dtype=torch.int32)


def _recovered_and_accepted(
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    *rest: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch = cu_num_draft_tokens.shape[0]
    width = draft_token_ids.shape[0] // batch
    new = target_probs.new_empty
    return new((batch, width), dtype=torch.int32), new((batch,), dtype=torch.int32)


define(_LIBRARY, "argmax(Tensor logits) -> Tensor", _argmax, _one_per_row)
define(
    _LIBRARY,
    "top_k_top_p(Tensor probs, Tensor? k=None, Tensor? p=None) -> Tensor",
    _top_k_top_p,
    _one_per_row,
)
define(
    _LIBRARY,
    "rejection_sample(Tensor draft_token_ids, Tensor target_probs, "
    "Tensor cu_num_draft_tokens, Tensor? k=None, Tensor? p=None) -> (Tensor, Tensor)",
    _rejection_sample,
    _recovered_and_accepted,
)

__getattr__ = missing_attribute("rebel.ops.torch_custom_ops.sampling")
