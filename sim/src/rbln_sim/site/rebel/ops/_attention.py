# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged KV cache, written for clarity.

One sequence at a time, accumulated in float64: the result for a token depends on
that token's own sequence and on nothing else, neither on the batch it is computed
in nor on how the prompt was cut into chunks.
"""

import torch


def write_paged(
    cache: torch.Tensor, rows: torch.Tensor, start: int, table: list[int]
) -> None:
    """Write a sequence's new rows into its blocks.

    Args:
        cache: ``[NB, BS, ...]``: the cache, block and token dimension first.
        rows: ``[L, ...]``: the new rows.
        start: Position of the first row in the sequence.
        table: The sequence's block ids in order. Rows beyond the table are
            dropped: the last chunk of a prompt is padded to its full length.
    """
    block_size = cache.shape[1]
    end = min(start + rows.shape[0], len(table) * block_size)
    position = start
    while position < end:
        index, offset = divmod(position, block_size)
        stop = min(end, (index + 1) * block_size)
        cache[table[index], offset : offset + stop - position] = rows[
            position - start : stop - start
        ]
        position = stop


def read_paged(
    cache: torch.Tensor, end: int, table: list[int], start: int = 0
) -> torch.Tensor:
    """Read a sequence's rows from its blocks.

    Args:
        cache: ``[NB, BS, ...]``.
        end: One past the last row, at most ``len(table) * BS``.
        table: The sequence's block ids in order.
        start: The first row; no block before its own is read.

    Returns:
        A new ``[end - start, ...]`` tensor in float64.
    """
    block_size = cache.shape[1]
    first = start // block_size
    blocks = table[first : -(-end // block_size)]
    rows = cache[torch.tensor(blocks, dtype=torch.long)].flatten(0, 1)
    return rows[start - first * block_size : end - first * block_size].double()


def causal_visibility(
    start: int, length: int, total: int, window: int | None = None
) -> torch.Tensor:
    """Which keys each query sees when it sees itself and what came before.

    Args:
        start: Position of the first query.
        length: Number of queries.
        total: Number of keys.
        window: How many keys it sees at most, the latest ones; None is all.

    Returns:
        A ``[length, total]`` bool tensor.
    """
    positions = torch.arange(start, start + length)[:, None]
    keys = torch.arange(total)
    visible = keys <= positions
    return visible if window is None else visible & (keys > positions - window)


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    visible: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention of one sequence.

    Args:
        queries: ``[H, G, L, D]``: KV heads, query heads for each, tokens, size.
        keys: ``[H, T, D]`` in float64.
        values: ``[H, T, DV]`` in float64.
        scale: Factor on the scores.
        visible: Bool, broadcastable to ``[H, G, L, T]``.
        sinks: ``[H * G, S]`` extra logits that take probability and add nothing.

    Returns:
        ``[H, G, L, DV]`` in the queries' dtype. A query that sees no key gets 0.
    """
    heads, groups, length, size = queries.shape
    total = keys.shape[1]
    # A KV head's query heads as rows of one product; a broadcast would copy keys.
    rows = (queries.double() * scale).reshape(heads, groups * length, size)
    scores = torch.bmm(rows, keys.transpose(1, 2)).view(heads, groups, length, total)
    scores.masked_fill_(~visible, float("-inf"))
    if sinks is not None:
        extra = sinks.double().reshape(heads, groups, 1, -1)
        scores = torch.cat([scores, extra.expand(-1, -1, length, -1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :total]
    # Without any key the softmax is 0/0; keys that are NaN must stay NaN, though.
    blind = ~visible.any(dim=-1, keepdim=True)
    if blind.any():
        weights = weights.masked_fill(blind, 0.0)
    out = torch.bmm(weights.reshape(heads, groups * length, total), values)
    return out.view(heads, groups, length, -1).to(queries.dtype)
