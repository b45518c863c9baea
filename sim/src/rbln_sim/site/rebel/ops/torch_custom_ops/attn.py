# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.rbln_custom_ops``: attention that also writes the paged KV cache.

Every operator writes the new keys and values into the cache and attends over the
block table. Schemas follow the call sites in vllm-rbln 0.12:

====================================  ====================================
``flash_causal_attention_naive_*``    causal, several blocks a sequence
``causal_attention_naive_*``          causal, one block a sequence
``flash_attention_naive_*``           mask instead of causality, several blocks
``attention_naive_*``                 mask instead of causality, one block
``paged_flash_causal_mla_naive_*``    MLA, causal
``sliding_window_attention_v1``       a window of what came before, several blocks
``sliding_window_attention_naive_*``  a window that is one block, and shifts in it
====================================  ====================================

Shapes: q ``[B, H, G, L, D]`` (KV heads, query heads for each), k and v
``[B, H, 1, L, D]``, cache ``[NB, 2, H, 1, BS, D]``; seq_idx ``[B, 1]`` is the
position of the first new token; block_tables ``[blocks]`` for prefill (B = 1) and
``[B, blocks]`` for decode. MLA: q ``[B, N, L, R + P]``, kv_c ``[B, L, R]``,
k_pe ``[B, L, P]``, cache ``[NB, BS, R + P]``. A window that shifts: cache_seq_len
``[B, 1]`` tokens are in the block, cache_offset ``[B, 1]`` with the new ones.

The custom kernels of vllm-rbln (``torch.ops.rbln_triton_ops``) are the same
operators over a cache ``[2, NB, H, 1, BS, D]``; see :func:`custom_kernel`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..._unsupported import missing_attribute, not_simulated
from .._register import Kernel, define_attention
from ._paged import (
    Planes,
    blocks_first,
    kv_first,
    mla_attention,
    paged_attention,
    shifted_attention,
)

__all__ = ["custom_kernel"]

_LIBRARY = torch.library.Library("rbln_custom_ops", "FRAGMENT")


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
    return paged_attention(name, kv, q, k, v, scale, seq_idx, block_tables, None, sinks)


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
    return paged_attention(name, kv, q, k, v, scale, seq_idx, block_tables, None, sinks)


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
    return paged_attention(name, kv, q, k, v, scale, seq_idx, block_tables, mask, sinks)


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
    return paged_attention(name, kv, q, k, v, scale, seq_idx, block_tables, mask, sinks)


def _sliding_window(
    name: str,
    planes: Planes,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    seq_idx: torch.Tensor,
    scale: torch.Tensor,
    block_tables: torch.Tensor,
    window_size: int,
    is_causal: bool,
    attn_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    if not is_causal or attn_mask is not None:
        raise not_simulated(f"{name} that is not causal, or has a mask")
    kv = planes(name, kv_cache)
    return paged_attention(
        name, kv, q, k, v, scale, seq_idx, block_tables, None, sinks, window_size
    )


def _shifted_prefill(
    name: str,
    planes: Planes,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    cache_seq_len: torch.Tensor,
    cache_offset: torch.Tensor,
    scale: torch.Tensor,
    block_tables: torch.Tensor,
    dummy: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    kv = planes(name, kv_cache)
    return shifted_attention(
        name, kv, q, k, v, cache_seq_len, cache_offset, scale, block_tables, sinks
    )


def _shifted_decode(name: str, planes: Planes, *args: Any) -> torch.Tensor:
    # In front of sinks comes the mask of an optimized batch, which says the same as
    # cache_seq_len.
    return _shifted_prefill(name, planes, *args[:9], *args[10:])


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
_SLIDING_WINDOW: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "sliding_window_attention_v1": (
        f"({_QKV}, Tensor seq_idx, Tensor scale, Tensor block_tables, "
        "int window_size, bool is_causal, Tensor? attn_mask=None, "
        "Tensor? sinks=None) -> Tensor",
        _sliding_window,
    ),
    "sliding_window_attention_naive_prefill": (
        f"({_QKV}, {_WINDOW}, Tensor dummy, Tensor? sinks=None) -> Tensor",
        _shifted_prefill,
    ),
    "sliding_window_attention_naive_decode": (
        f"({_QKV}, {_WINDOW}, Tensor dummy, Tensor? attn_mask=None, "
        "Tensor? sinks=None) -> Tensor",
        _shifted_decode,
    ),
}
_PHASES = ("prefill", "decode")
_OPERATORS = _SLIDING_WINDOW | {
    f"{base}_{phase}": operator
    for base, operator in _PAGED.items()
    for phase in _PHASES
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
    if name not in _OPERATORS:
        raise not_simulated(
            f"the custom kernel rbln_triton_ops.{name}", "turn custom kernels off"
        )
    return functools.partial(_OPERATORS[name][1], f"rbln_triton_ops.{name}", kv_first)


def _register() -> None:
    namespace = _LIBRARY.ns
    for name, (schema, kernel) in _OPERATORS.items():
        bound = functools.partial(kernel, f"{namespace}.{name}", blocks_first)
        define_attention(_LIBRARY, name + schema, bound, _like_q)
    for phase in _PHASES:
        name = f"paged_flash_causal_mla_naive_{phase}"
        bound = functools.partial(mla_attention, f"{namespace}.{name}")
        define_attention(_LIBRARY, name + _MLA_SCHEMA, bound, _like_latent)


_register()

__getattr__ = missing_attribute("rebel.ops.torch_custom_ops.attn")
