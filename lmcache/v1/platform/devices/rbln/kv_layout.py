# SPDX-License-Identifier: Apache-2.0
"""Layout arithmetic of paged RBLN KV caches. No byte moves here.

vLLM-RBLN allocates one tensor per layer in one of three layouts:

====================  ====================================  ==================
layout                per-layer tensor                      ``EngineKVFormat``
====================  ====================================  ==================
blocks-first HND      ``[NB, 2, NH, 1, BS, HS]``            ``BLOCKS_FIRST``
K/V-first HND         ``[2, NB, NH, 1, BS, HS]``            ``NL_X_TWO_NB_NH_ONE_BS_HS``
MLA                   ``[NB, BS, HS]``                      ``NL_X_NB_BS_HS``
====================  ====================================  ==================

All three become the same *block view* ``[NB, P, NH, BS, HS]`` (``P`` planes: K and
V, or the one latent plane of MLA, which also has ``NH == 1``), whose last three
axes are dense. A chunk, LMCache's token-major ``[2, L, T, NH*HS]`` or
``[L, T, HS]``, becomes the *chunk view* ``[P, L, T, NH, HS]``.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

# Third Party
import torch

# First Party
from lmcache.lmcache_native import EngineKVFormat
from lmcache.v1.platform.devices.rbln.lmcache_release import BLOCKS_FIRST
from lmcache.v1.platform.devices.rbln.native import kv_transpose

#: The three formats the backend moves, each with the layouts it stands for.
_LAYOUTS: dict[EngineKVFormat, str] = {
    BLOCKS_FIRST: "blocks-first HND [NB, 2, NH, 1, BS, HS]",
    EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS: "K/V-first HND [2, NB, NH, 1, BS, HS]",
    EngineKVFormat.NL_X_NB_BS_HS: "MLA [NB, BS, HS]",
}


@dataclass(frozen=True)
class KVGeometry:
    """Sizes shared by every layer of one paged KV cache.

    Attributes:
        num_layers: Layers (``L``).
        num_blocks: Paged blocks per layer (``NB``).
        num_planes: 2 for K and V, 1 for MLA (``P``).
        num_heads: KV heads (``NH``), 1 for MLA.
        block_size: Tokens per block (``BS``).
        head_size: Elements per head and token (``HS``).
        dtype: Element type of the cache and of its chunks.
        device: Device that holds every layer.
        strides: Strides of a block view ``[NB, P, NH, BS, HS]``, in elements.
    """

    num_layers: int
    num_blocks: int
    num_planes: int
    num_heads: int
    block_size: int
    head_size: int
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...]

    @property
    def view_shape(self) -> tuple[int, ...]:
        """Shape of a block view, ``(NB, P, NH, BS, HS)``."""
        return (
            self.num_blocks,
            self.num_planes,
            self.num_heads,
            self.block_size,
            self.head_size,
        )

    def chunk_shape(self, tokens: int) -> tuple[int, ...]:
        """Return the wire shape of a chunk of ``tokens`` tokens.

        Args:
            tokens: Tokens in the chunk.

        Returns:
            ``(2, L, T, NH*HS)``, or ``(L, T, HS)`` for MLA.
        """
        tail = (self.num_layers, tokens, self.num_heads * self.head_size)
        return (self.num_planes, *tail) if self.num_planes == 2 else tail


def resolve_geometry(
    layers: Sequence[torch.Tensor], engine_kv_format: EngineKVFormat
) -> KVGeometry:
    """Validate the layers of one KV cache.

    Args:
        layers: One tensor per layer, 6-D or with the singleton axis squeezed (5-D)
            for HND, 3-D for MLA.
        engine_kv_format: Format that the detector reported for these layers.

    Returns:
        The geometry of all layers.

    Raises:
        ValueError: If there is no layer, the format is none of the three, a tensor is
            not of that layout, is a ``meta`` tensor, has no dense head-blocks or
            overlapping blocks, or the layers differ in shape, strides, dtype or device.
    """
    if engine_kv_format not in _LAYOUTS:
        raise ValueError(
            f"RBLN moves {', '.join(_LAYOUTS.values())}; got format "
            f"{engine_kv_format!r}. Serve with `--model-impl vllm` so that vLLM-RBLN "
            "allocates one of these"
        )
    if not layers:
        raise ValueError("RBLN block transfer wants at least one KV layer, got none")
    first = layers[0]
    traits = _traits(first)
    if first.is_meta:
        _refuse_layer(0, first, traits)
    # Every transfer asks for all of its layers, for which Python would need a tenth of
    # the time of a whole small transfer.
    unlike = kv_transpose().first_unlike(layers)
    if unlike is not None:
        _refuse_layer(unlike, layers[unlike], traits)
    return _geometry_of(len(layers), *traits, engine_kv_format)


_Traits = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


def _traits(layer: torch.Tensor) -> _Traits:
    return tuple(layer.shape), layer.stride(), layer.dtype, layer.device


@lru_cache
def _geometry_of(
    num_layers: int,
    layer_shape: tuple[int, ...],
    layer_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    engine_kv_format: EngineKVFormat,
) -> KVGeometry:
    """Return the geometry of layers that are alike, or refuse them.

    Each transfer asks, mostly for the same cache, and has to wait for the answer.
    """
    layout = _LAYOUTS[engine_kv_format]
    shape, strides = _block_axes(layer_shape, layer_strides, engine_kv_format, layout)
    _require_dense_head_blocks(shape, strides, layout)
    num_blocks, planes, heads, block_size, head_size = shape
    return KVGeometry(
        num_layers=num_layers,
        num_blocks=num_blocks,
        num_planes=planes,
        num_heads=heads,
        block_size=block_size,
        head_size=head_size,
        dtype=dtype,
        device=device,
        strides=strides,
    )


def _refuse_layer(index: int, layer: torch.Tensor, wanted: _Traits) -> NoReturn:
    """Refuse a layer without memory, or one that is not as layer 0."""
    if layer.is_meta:
        raise ValueError(
            f"KV layer {index} is a meta tensor without memory; start vLLM-RBLN "
            "with VLLM_RBLN_USE_DEVICE_TENSOR=1 so that the KV cache is in device "
            "tensors"
        )
    raise ValueError(
        "the KV layers of one transfer must agree in shape, strides, dtype and "
        f"device; layer 0 is {wanted}, layer {index} is {_traits(layer)}. Models with "
        "several kinds of KV cache (hybrid, sliding window) are not supported"
    )


_Axes = tuple[tuple[int, ...], tuple[int, ...]]


def _block_axes(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    engine_kv_format: EngineKVFormat,
    layout: str,
) -> _Axes:
    """Return one layer's shape and strides as ``[NB, P, NH, BS, HS]``, or refuse it."""
    mismatch = ValueError(f"KV layer of shape {list(shape)} is not {layout}")
    if min(shape, default=0) < 1:
        raise mismatch
    if engine_kv_format == EngineKVFormat.NL_X_NB_BS_HS:
        if len(shape) != 3:
            raise mismatch
        # One plane of one head: nothing is a stride away.
        return (shape[0], 1, 1, *shape[1:]), (*strides[:1] * 3, *strides[1:])
    if len(shape) == 6:
        if shape[3] != 1:
            raise mismatch
        shape, strides = shape[:3] + shape[4:], strides[:3] + strides[4:]
    if len(shape) != 5:
        raise mismatch
    if engine_kv_format == EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS:
        shape = (shape[1], shape[0], *shape[2:])
        strides = (strides[1], strides[0], *strides[2:])
    if shape[1] != 2:
        raise mismatch
    return shape, strides


def _require_dense_head_blocks(
    shape: tuple[int, ...], strides: tuple[int, ...], layout: str
) -> None:
    """Refuse strides that a contiguous copy of ``[NH, BS, HS]`` would misread."""
    num_blocks, planes, heads, block_size, head_size = shape
    head_block = heads * block_size * head_size
    inner = ((heads, block_size * head_size), (block_size, head_size), (head_size, 1))
    dense = all(
        size == 1 or stride == wanted
        for (size, wanted), stride in zip(inner, strides[2:], strict=True)
    )
    # The two outer axes may be padded, but never overlap.
    extent = head_block
    for stride, size in sorted(zip(strides[:2], (num_blocks, planes), strict=True)):
        if size > 1:
            dense = dense and stride >= extent
            extent = stride * (size - 1) + extent
    if not dense:
        raise ValueError(
            f"KV layer with strides {list(strides)} over the axes "
            f"[NB, P, NH, BS, HS] = {list(shape)} has no dense [NH, BS, HS] "
            f"head-blocks or its blocks overlap; RBLN moves {layout} with at most "
            "padding between blocks"
        )
