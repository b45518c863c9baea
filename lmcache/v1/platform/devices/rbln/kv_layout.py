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
axes are dense.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

# Third Party
import torch

# First Party
from lmcache.lmcache_native import EngineKVFormat
from lmcache.v1.platform.devices.rbln.lmcache_release import BLOCKS_FIRST

#: Element widths, in bytes, that transfers can move.
ELEMENT_BYTES = (1, 2, 4, 8)
#: The three formats the backend moves, each with the layouts it stands for.
_LAYOUTS: dict[EngineKVFormat, str] = {
    BLOCKS_FIRST: "blocks-first HND [NB, 2, NH, 1, BS, HS]",
    EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS: "K/V-first HND [2, NB, NH, 1, BS, HS]",
    EngineKVFormat.NL_X_NB_BS_HS: "MLA [NB, BS, HS]",
}


@dataclass(frozen=True)
class KVGeometry:
    """What every layer of one paged KV cache has.

    Attributes:
        sizes: Of the block view: blocks, planes, KV heads, tokens of a block, and
            elements per head and token.
        strides: Elements between blocks, and between planes.
        dtype: Element type of the cache and of its chunks.
        device: Device that holds every layer.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


#: Shape, strides, dtype and device of a layer.
LayerTraits = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


def layer_traits(layers: Sequence[torch.Tensor]) -> LayerTraits:
    """Return what is common to layers; the native plan refuses others.

    Raises:
        ValueError: There is no layer, or it has no memory.
    """
    if not layers:
        raise ValueError("RBLN block transfer wants at least one KV layer, got none")
    first = layers[0]
    if first.is_meta:
        raise ValueError(
            "KV layer 0 is a meta tensor without memory; start vLLM-RBLN with "
            "VLLM_RBLN_USE_DEVICE_TENSOR=1 so that the KV cache is in device tensors"
        )
    return first.shape, first.stride(), first.dtype, first.device


@lru_cache
def resolve_geometry(
    layer: LayerTraits, engine_kv_format: EngineKVFormat
) -> KVGeometry:
    """Return the geometry of a layer.

    Args:
        layer: Of a tensor that is 6-D or with the singleton axis squeezed (5-D) for
            HND, 3-D for MLA.
        engine_kv_format: Format that the detector reported for it.

    Returns:
        The geometry.

    Raises:
        ValueError: If the format is none of the three, or the layer is not of that
            layout, has elements of an odd width, no dense head-blocks or overlapping
            blocks.
    """
    if engine_kv_format not in _LAYOUTS:
        raise ValueError(
            f"RBLN moves {', '.join(_LAYOUTS.values())}; got format "
            f"{engine_kv_format!r}. Serve with `--model-impl vllm` so that vLLM-RBLN "
            "allocates one of these"
        )
    layer_shape, layer_strides, dtype, device = layer
    if dtype.itemsize not in ELEMENT_BYTES:
        raise ValueError(
            f"the KV cache is {dtype}, wanted elements of "
            f"{', '.join(map(str, ELEMENT_BYTES))} bytes"
        )
    layout = _LAYOUTS[engine_kv_format]
    shape, strides = _block_axes(layer_shape, layer_strides, engine_kv_format, layout)
    _require_dense_head_blocks(shape, strides, layout)
    return KVGeometry(shape, strides[:2], dtype, device)


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
