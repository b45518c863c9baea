# SPDX-License-Identifier: Apache-2.0
"""Attention of a batch that writes its keys and values into a KV cache, all checked.

Nothing is written before every argument has been checked. A cache is seen as two planes
``[NB, BS, H, D]``, keys and values, whatever its layout.
"""

from collections.abc import Callable

import torch

from .._attention import attend, causal_visibility, read_paged, write_paged

Planes = Callable[[str, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _refuse(name: str, what: str, wanted: str, got: object) -> ValueError:
    return ValueError(f"{name}: {what} must be {wanted}, got {got}")


def _token_major(plane: torch.Tensor) -> torch.Tensor:
    # [NB, H, 1, BS, D] -> [NB, BS, H, D], a view.
    return plane[:, :, 0].transpose(1, 2)


def blocks_first(name: str, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the planes of a cache ``[NB, 2, H, 1, BS, D]``."""
    if kv.dim() != 6 or kv.shape[1] != 2 or kv.shape[3] != 1:
        raise _refuse(name, "kv_cache", "[NB, 2, H, 1, BS, D]", tuple(kv.shape))
    return _token_major(kv[:, 0]), _token_major(kv[:, 1])


def kv_first(name: str, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the planes of a cache ``[2, NB, H, 1, BS, D]``."""
    if kv.dim() != 6 or kv.shape[0] != 2 or kv.shape[3] != 1:
        raise _refuse(name, "kv_cache", "[2, NB, H, 1, BS, D]", tuple(kv.shape))
    return _token_major(kv[0]), _token_major(kv[1])


def _tables(
    name: str, block_tables: torch.Tensor, batch: int, num_blocks: int
) -> list[list[int]]:
    """Block table of each sequence of the batch, checked."""
    tables = block_tables.unsqueeze(0) if block_tables.dim() == 1 else block_tables
    if tables.dim() != 2 or tables.shape[0] != batch:
        wanted = f"[{batch}, blocks] (or [blocks] for a batch of 1)"
        raise _refuse(name, "block_tables", wanted, tuple(block_tables.shape))
    rows: list[list[int]] = tables.tolist()
    for row in rows:
        if not all(0 <= block < num_blocks for block in row):
            raise _refuse(name, "block ids", f"in 0..{num_blocks - 1}", row)
    return rows


def _numbers(name: str, label: str, values: torch.Tensor, batch: int) -> list[int]:
    """One number for each sequence of the batch, checked."""
    if values.numel() != batch:
        raise _refuse(name, label, f"[{batch}, 1]", tuple(values.shape))
    numbers: list[int] = values.reshape(-1).tolist()
    return numbers


def _sequences(
    name: str,
    seq_idx: torch.Tensor,
    block_tables: torch.Tensor,
    batch: int,
    num_blocks: int,
    block_size: int,
) -> list[tuple[int, list[int]]]:
    """Start position and block table of each sequence of the batch, checked."""
    starts = _numbers(name, "seq_idx", seq_idx, batch)
    rows = _tables(name, block_tables, batch, num_blocks)
    for start, row in zip(starts, rows, strict=True):
        if not 0 <= start < len(row) * block_size:
            wanted = f"in 0..{len(row) * block_size - 1} (blocks * block size)"
            raise _refuse(name, "seq_idx", wanted, start)
    return list(zip(starts, rows, strict=True))


def _check_rows(
    name: str,
    key_cache: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    heads, size = key_cache.shape[2:]
    if q.dim() != 5 or q.shape[1] != heads or q.shape[-1] != size:
        raise _refuse(name, "q", f"[B, {heads}, G, L, {size}]", tuple(q.shape))
    batch, _, _, length, _ = q.shape
    for label, rows in (("k", k), ("v", v)):
        if rows.shape != (batch, heads, 1, length, size):
            wanted = f"[{batch}, {heads}, 1, {length}, {size}]"
            raise _refuse(name, label, wanted, tuple(rows.shape))


def paged_attention(
    name: str,
    planes: tuple[torch.Tensor, torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: torch.Tensor,
    seq_idx: torch.Tensor,
    block_tables: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    window: int | None = None,
) -> torch.Tensor:
    """Append to each sequence's blocks and attend over them; shapes are those of attn.

    Args:
        name: Of the operator.
        planes: Keys and values of the cache.
        q: Queries.
        k: New keys.
        v: New values.
        scale: Factor on the scores.
        seq_idx: Position of each sequence's first new token.
        block_tables: Blocks of each sequence.
        mask: What is seen, ``[B or 1, 1, 1, L, C]``; None is what came before.
        sinks: See :func:`attend`.
        window: Tokens that a query sees of what came before, itself among them; None is
            all. What no query sees is not read: its blocks may be others' by now.

    Raises:
        ValueError: The arguments do not fit each other.
    """
    key_cache, value_cache = planes
    _check_rows(name, key_cache, q, k, v)
    num_blocks, block_size = key_cache.shape[:2]
    batch, _, _, length, _ = q.shape
    if window is not None and window < 1:
        raise _refuse(name, "window_size", "at least 1", window)
    placed = _sequences(name, seq_idx, block_tables, batch, num_blocks, block_size)
    out = torch.empty_like(q)
    for i, (start, table) in enumerate(placed):
        write_paged(key_cache, k[i, :, 0].transpose(0, 1), start, table)
        write_paged(value_cache, v[i, :, 0].transpose(0, 1), start, table)
        total = min(start + length, len(table) * block_size)
        first = 0 if window is None else max(0, start - window + 1)
        if mask is None:
            visible = causal_visibility(start - first, length, total - first, window)
        else:
            # What exceeds the sequence is not there to see.
            visible = mask[i if mask.shape[0] > 1 else 0][..., :total] > 0
        out[i] = attend(
            q[i],
            read_paged(key_cache, total, table, first).transpose(0, 1),
            read_paged(value_cache, total, table, first).transpose(0, 1),
            float(scale),
            visible,
            sinks,
        )
    return out


def shifted_attention(
    name: str,
    planes: tuple[torch.Tensor, torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seq_len: torch.Tensor,
    cache_offset: torch.Tensor,
    scale: torch.Tensor,
    block_tables: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend over a window that each sequence keeps in one block, and shift it.

    The block is as large as the window, and its oldest token comes first. Rows of the
    batch and tokens behind ``cache_offset`` only pad, and write nothing.

    Args:
        name: Of the operator.
        planes: Keys and values of the cache.
        q: Queries.
        k: New keys.
        v: New values.
        cache_seq_len: Tokens in each sequence's block, ``[B, 1]``.
        cache_offset: The same with the new tokens, ``[B, 1]``.
        scale: Factor on the scores.
        block_tables: The block, ``[1]`` or ``[B, 1]``.
        sinks: See :func:`attend`.

    Returns:
        Like q; 0 for what only pads.

    Raises:
        ValueError: The arguments do not fit each other.
    """
    key_cache, value_cache = planes
    _check_rows(name, key_cache, q, k, v)
    num_blocks, window = key_cache.shape[:2]
    batch, _, _, length, _ = q.shape
    tables = _tables(name, block_tables, batch, num_blocks)
    held = _numbers(name, "cache_seq_len", cache_seq_len, batch)
    ends = _numbers(name, "cache_offset", cache_offset, batch)
    for count, end in zip(held, ends, strict=True):
        if not 0 <= count <= window:
            raise _refuse(name, "cache_seq_len", f"in 0..{window} (block size)", count)
        if not count <= end <= count + length:
            raise _refuse(name, "cache_offset", f"in {count}..{count + length}", end)
    out = torch.zeros_like(q)
    for i, (count, end, table) in enumerate(zip(held, ends, tables, strict=True)):
        if count == end:
            continue
        keys, values = (
            torch.cat(
                [plane[table[0], :count], new[i, :, 0, : end - count].transpose(0, 1)]
            )
            for plane, new in ((key_cache, k), (value_cache, v))
        )
        out[i] = attend(
            q[i],
            keys.transpose(0, 1).double(),
            values.transpose(0, 1).double(),
            float(scale),
            causal_visibility(count, length, end, window),
            sinks,
        )
        kept = min(end, window)
        key_cache[table[0], :kept] = keys[-kept:]
        value_cache[table[0], :kept] = values[-kept:]
    return out


def mla_attention(
    name: str,
    q: torch.Tensor,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    seq_idx: torch.Tensor,
    block_tables: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    """Append to each sequence's blocks of latent rows and attend over them.

    Shapes are those of attn.

    Raises:
        ValueError: The arguments do not fit each other.
    """
    if kv_cache.dim() != 3:
        raise _refuse(name, "kv_cache", "[NB, BS, R + P]", tuple(kv_cache.shape))
    num_blocks, block_size, size = kv_cache.shape
    if q.dim() != 4 or q.shape[-1] != size:
        raise _refuse(name, "q", f"[B, N, L, {size}]", tuple(q.shape))
    batch, heads, length, _ = q.shape
    rank = kv_c_normed.shape[-1]
    # vllm-rbln passes k_pe with or without its single head dimension.
    latent = kv_c_normed.reshape(batch, length, rank)
    rows = torch.cat([latent, k_pe.reshape(batch, length, size - rank)], dim=-1)
    placed = _sequences(name, seq_idx, block_tables, batch, num_blocks, block_size)
    out = torch.empty((batch, heads, length, rank), dtype=q.dtype)
    for i, (start, table) in enumerate(placed):
        write_paged(kv_cache, rows[i], start, table)
        total = min(start + length, len(table) * block_size)
        keys = read_paged(kv_cache, total, table).unsqueeze(0)
        visible = causal_visibility(start, length, total)
        out[i] = attend(
            q[i].unsqueeze(0), keys, keys[..., :rank], float(scale), visible
        ).squeeze(0)
    return out
