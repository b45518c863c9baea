# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.rbln_custom_ops``: attention that also writes the paged KV cache.

Every operator writes the new keys and values into the cache first and then
attends over the block table. Schemas follow the call sites in vllm-rbln 0.12:

=================================  ====================================
``flash_causal_attention_naive_*``  causal, several blocks a sequence
``causal_attention_naive_*``        causal, one block a sequence
``flash_attention_naive_*``         mask instead of causality, several blocks
``attention_naive_*``               mask instead of causality, one block
``paged_flash_causal_mla_naive_*``  MLA, causal
=================================  ====================================

Shapes: q ``[B, H, G, L, D]`` (KV heads, query heads for each), k and v
``[B, H, 1, L, D]``, cache ``[NB, 2, H, 1, BS, D]``; seq_idx ``[B, 1]`` is the
position of the first new token; block_tables ``[blocks]`` for prefill (B = 1) and
``[B, blocks]`` for decode. MLA: q ``[B, N, L, R + P]``, kv_c ``[B, L, R]``,
k_pe ``[B, L, P]``, cache ``[NB, BS, R + P]``.

The custom kernels of vllm-rbln (``torch.ops.rbln_triton_ops``) are the same
operators over a cache ``[2, NB, H, 1, BS, D]``; see :func:`custom_kernel`.
"""

import functools
from collections.abc import Callable, Sequence

import torch

from ..._unsupported import missing_attribute, not_simulated
from .._attention import attend, causal_visibility, read_paged, write_paged
from .._register import Kernel, define

__all__ = ["custom_kernel"]

_LIBRARY = torch.library.Library("rbln_custom_ops", "FRAGMENT")

Planes = Callable[[str, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _refuse(name: str, what: str, wanted: str, got: object) -> ValueError:
    return ValueError(f"{name}: {what} must be {wanted}, got {got}")


def _token_major(plane: torch.Tensor) -> torch.Tensor:
    # [NB, H, 1, BS, D] -> [NB, BS, H, D], a view.
    return plane[:, :, 0].transpose(1, 2)


def _blocks_first(name: str, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if kv.dim() != 6 or kv.shape[1] != 2 or kv.shape[3] != 1:
        raise _refuse(name, "kv_cache", "[NB, 2, H, 1, BS, D]", tuple(kv.shape))
    return _token_major(kv[:, 0]), _token_major(kv[:, 1])


def _kv_first(name: str, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if kv.dim() != 6 or kv.shape[0] != 2 or kv.shape[3] != 1:
        raise _refuse(name, "kv_cache", "[2, NB, H, 1, BS, D]", tuple(kv.shape))
    return _token_major(kv[0]), _token_major(kv[1])


def _sequences(
    name: str,
    seq_idx: torch.Tensor,
    block_tables: torch.Tensor,
    batch: int,
    num_blocks: int,
    block_size: int,
) -> list[tuple[int, list[int]]]:
    """Start position and block table of each sequence of the batch, checked."""
    if seq_idx.numel() != batch:
        raise _refuse(name, "seq_idx", f"[{batch}, 1]", tuple(seq_idx.shape))
    tables = block_tables.unsqueeze(0) if block_tables.dim() == 1 else block_tables
    if tables.dim() != 2 or tables.shape[0] != batch:
        wanted = f"[{batch}, blocks] (or [blocks] for a batch of 1)"
        raise _refuse(name, "block_tables", wanted, tuple(block_tables.shape))
    starts: list[int] = seq_idx.reshape(-1).tolist()
    rows: list[list[int]] = tables.tolist()
    for start, row in zip(starts, rows, strict=True):
        if not 0 <= start < len(row) * block_size:
            wanted = f"in 0..{len(row) * block_size - 1} (blocks * block size)"
            raise _refuse(name, "seq_idx", wanted, start)
        if not all(0 <= block < num_blocks for block in row):
            raise _refuse(name, "block ids", f"in 0..{num_blocks - 1}", row)
    return list(zip(starts, rows, strict=True))


def _paged_attention(
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
) -> torch.Tensor:
    key_cache, value_cache = planes
    num_blocks, block_size, heads, size = key_cache.shape
    if q.dim() != 5 or q.shape[1] != heads or q.shape[-1] != size:
        raise _refuse(name, "q", f"[B, {heads}, G, L, {size}]", tuple(q.shape))
    batch, _, _, length, _ = q.shape
    for label, rows in (("k", k), ("v", v)):
        if rows.shape != (batch, heads, 1, length, size):
            wanted = f"[{batch}, {heads}, 1, {length}, {size}]"
            raise _refuse(name, label, wanted, tuple(rows.shape))
    sequences = _sequences(name, seq_idx, block_tables, batch, num_blocks, block_size)
    out = _like_q(q)
    for i, (start, table) in enumerate(sequences):
        write_paged(key_cache, k[i, :, 0].transpose(0, 1), start, table)
        write_paged(value_cache, v[i, :, 0].transpose(0, 1), start, table)
        total = min(start + length, len(table) * block_size)
        if mask is None:
            visible = causal_visibility(start, length, total)
        else:
            # [B or 1, 1, 1, L, C]; what exceeds the sequence is not there to see.
            visible = mask[i if mask.shape[0] > 1 else 0][..., :total] > 0
        out[i] = attend(
            q[i],
            read_paged(key_cache, total, table).transpose(0, 1),
            read_paged(value_cache, total, table).transpose(0, 1),
            float(scale),
            visible,
            sinks,
        )
    return out


def _flash_causal_attention(
    name: str,
    planes: Planes,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: torch.Tensor,
    seq_idx: torch.Tensor,
    block_tables: torch.Tensor,
    dummy: torch.Tensor,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    cache_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    if cache_dtype is not None:
        raise not_simulated(
            f"{name} with a {cache_dtype} KV cache", "use --kv-cache-dtype auto"
        )
    kv = planes(name, kv_cache)
    return _paged_attention(
        name, kv, q, k, v, scale, seq_idx, block_tables, None, sinks
    )


def _causal_attention(
    name: str,
    planes: Planes,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    seq_idx: torch.Tensor,
    scale: torch.Tensor,
    block_tables: torch.Tensor,
    dummy: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    kv = planes(name, kv_cache)
    return _paged_attention(
        name, kv, q, k, v, scale, seq_idx, block_tables, None, sinks
    )


def _flash_attention(
    name: str,
    planes: Planes,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    mask: torch.Tensor,
    scale: torch.Tensor,
    seq_idx: torch.Tensor,
    block_tables: torch.Tensor,
    dummy: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    kv = planes(name, kv_cache)
    return _paged_attention(
        name, kv, q, k, v, scale, seq_idx, block_tables, mask, sinks
    )


def _attention(
    name: str,
    planes: Planes,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    mask: torch.Tensor,
    seq_idx: torch.Tensor,
    scale: torch.Tensor,
    block_tables: torch.Tensor,
    dummy: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    kv = planes(name, kv_cache)
    return _paged_attention(
        name, kv, q, k, v, scale, seq_idx, block_tables, mask, sinks
    )


def _mla(
    name: str,
    q: torch.Tensor,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    seq_idx: torch.Tensor,
    block_tables: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
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
    sequences = _sequences(name, seq_idx, block_tables, batch, num_blocks, block_size)
    out = torch.empty((batch, heads, length, rank), dtype=q.dtype)
    for i, (start, table) in enumerate(sequences):
        write_paged(kv_cache, rows[i], start, table)
        total = min(start + length, len(table) * block_size)
        keys = read_paged(kv_cache, total, table).unsqueeze(0)
        visible = causal_visibility(start, length, total)
        out[i] = attend(
            q[i].unsqueeze(0), keys, keys[..., :rank], float(scale), visible
        ).squeeze(0)
    return out


def _sliding_window(name: str, *args: object) -> torch.Tensor:
    raise not_simulated(
        f"sliding-window attention ({name})", "use a model with full attention"
    )


def _like_q(q: torch.Tensor, *rest: object) -> torch.Tensor:
    # The strides of q too, as vllm-rbln's shape functions for its custom kernels have
    # it: of several tokens a sequence it takes the result as [tokens, heads, size], a
    # view that a contiguous result does not have.
    return torch.empty_like(q)


def _like_latent(
    q: torch.Tensor, kv_c_normed: torch.Tensor, *rest: object
) -> torch.Tensor:
    return q.new_empty((*q.shape[:-1], kv_c_normed.shape[-1]))


_QKV = "Tensor q, Tensor k, Tensor v, Tensor(a!) kv_cache"
_END = "Tensor block_tables, Tensor dummy, Tensor? sinks=None"
_PAGED: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "flash_causal_attention_naive": (
        f"({_QKV}, Tensor scale, Tensor seq_idx, {_END}, Tensor? k_scale=None, "
        "Tensor? v_scale=None, ScalarType? cache_dtype=None) -> Tensor",
        _flash_causal_attention,
    ),
    "causal_attention_naive": (
        f"({_QKV}, Tensor seq_idx, Tensor scale, {_END}) -> Tensor",
        _causal_attention,
    ),
    "flash_attention_naive": (
        f"({_QKV}, Tensor mask, Tensor scale, Tensor seq_idx, {_END}) -> Tensor",
        _flash_attention,
    ),
    "attention_naive": (
        f"({_QKV}, Tensor mask, Tensor seq_idx, Tensor scale, {_END}) -> Tensor",
        _attention,
    ),
}
_MLA_SCHEMA = (
    "(Tensor q, Tensor kv_c_normed, Tensor k_pe, Tensor(a!) kv_cache, "
    "Tensor seq_idx, Tensor block_tables, Tensor scale) -> Tensor"
)
_WINDOW = "Tensor cache_seq_len, Tensor cache_offset, Tensor scale, Tensor block_tables"
_SLIDING_WINDOW = {
    "sliding_window_attention_v1": (
        f"({_QKV}, Tensor seq_idx, Tensor scale, Tensor block_tables, "
        "int window_size, bool is_causal, Tensor? attn_mask=None, "
        "Tensor? sinks=None) -> Tensor"
    ),
    "sliding_window_attention_naive_prefill": (
        f"({_QKV}, {_WINDOW}, Tensor dummy, Tensor? sinks=None) -> Tensor"
    ),
    "sliding_window_attention_naive_decode": (
        f"({_QKV}, {_WINDOW}, Tensor dummy, Tensor? attn_mask=None, "
        "Tensor? sinks=None) -> Tensor"
    ),
}


def custom_kernel(name: str) -> Kernel:
    """Find what a ``rbln_triton_ops`` operator computes.

    On an NPU the compiler replaces those operators by kernels; the backend of the
    simulator replaces them by this.

    Args:
        name: Operator name without its namespace.

    Returns:
        A function with the operator's arguments, over a K/V-first cache.

    Raises:
        NotImplementedError: The operator is not simulated.
    """
    base, _, phase = name.rpartition("_")
    if base not in _PAGED or phase not in ("prefill", "decode"):
        raise not_simulated(
            f"the custom kernel rbln_triton_ops.{name}", "turn custom kernels off"
        )
    qualified = f"rbln_triton_ops.{name}"
    return functools.partial(_PAGED[base][1], qualified, _kv_first)


def _register(phases: Sequence[str]) -> None:
    namespace = _LIBRARY.ns
    for phase in phases:
        for base, (schema, kernel) in _PAGED.items():
            name = f"{base}_{phase}"
            bound = functools.partial(kernel, f"{namespace}.{name}", _blocks_first)
            define(_LIBRARY, name + schema, bound, _like_q)
        name = f"paged_flash_causal_mla_naive_{phase}"
        bound = functools.partial(_mla, f"{namespace}.{name}")
        define(_LIBRARY, name + _MLA_SCHEMA, bound, _like_latent)
    for name, schema in _SLIDING_WINDOW.items():
        refuse = functools.partial(_sliding_window, f"{namespace}.{name}")
        define(_LIBRARY, name + schema, refuse, _like_q)


_register(("prefill", "decode"))

__getattr__ = missing_attribute("rebel.ops.torch_custom_ops.attn")
