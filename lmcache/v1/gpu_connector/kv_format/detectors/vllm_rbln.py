# SPDX-License-Identifier: Apache-2.0
"""KV cache detection for vLLM, with the layouts that vLLM-RBLN allocates.

LMCache's scan keeps the last detector that it finds for an engine, so this one, later
in the alphabet, stands in front of vLLM's own and leaves every layout that is not
vLLM-RBLN's to it.

vLLM-RBLN's attention caches are 6-D with a singleton before the tokens:
``[NB, 2, NH, 1, BS, HS]`` (blocks first) or ``[2, NB, NH, 1, BS, HS]`` (K/V first).
vLLM's layout hint is not read: it describes another backend's view of these tensors.
"""

# Future
from __future__ import annotations

# Standard
import importlib.util
import os
import weakref

# Third Party
import torch

# First Party
from lmcache.lmcache_native import EngineKVFormat
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.kv_format.detectors import vllm
from lmcache.v1.gpu_connector.kv_format.types import DiscoverableKVCache, LayoutHints
from lmcache.v1.platform.devices.rbln import settings
from lmcache.v1.platform.devices.rbln.lmcache_release import (
    BLOCKS_FIRST,
    HAS_BLOCKS_FIRST,
)

#: Says which layout a cache of two blocks has, where vLLM-RBLN can't be asked.
LAYOUT_ENV_VAR = "LMCACHE_RBLN_KV_LAYOUT"
_LAYOUT_BLOCK_AXIS = {"blocks_first": 0, "kv_first": 1}

#: Block axis of caches whose shape does not tell, by storage address. An entry is
#: valid as long as its storage lives, whatever later stands at the same address.
_known_axes: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}


class VLLM_RBLN_Detector(vllm.VLLM_Detector):
    """vLLM's detector, extended by vLLM-RBLN's attention layouts."""

    engine_type = EngineType.VLLM

    def discover(
        self, kv_caches: DiscoverableKVCache, layout_hints: LayoutHints
    ) -> tuple[EngineKVFormat | None, DiscoverableKVCache]:
        """Identify the layout of vLLM's KV caches.

        Args:
            kv_caches: One tensor per layer for vLLM-RBLN; anything vLLM allocates.
            layout_hints: Passed on for layouts that are not vLLM-RBLN's.

        Returns:
            The format and the caches in that format's shape, sharing storage.

        Raises:
            ValueError: If 6-D caches are neither of the two layouts or have no memory,
                or two blocks make the layouts indistinguishable and neither vLLM-RBLN
                nor ``LMCACHE_RBLN_KV_LAYOUT`` tells them apart. Also if caches are on
                an RBLN device and a setting of its transfers, or that one, is invalid.
        """
        if not isinstance(kv_caches, list) or not kv_caches:
            return super().discover(kv_caches, layout_hints)
        _require_transfer_settings(kv_caches[0])
        tensors = [cache for cache in kv_caches if isinstance(cache, torch.Tensor)]
        if len(tensors) != len(kv_caches) or tensors[0].ndim != 6:
            return super().discover(kv_caches, layout_hints)
        for cache in tensors:
            if cache.is_meta:
                raise ValueError(
                    "the KV caches are meta tensors without memory; start vLLM-RBLN "
                    "with VLLM_RBLN_USE_DEVICE_TENSOR=1"
                )
            if cache.ndim != 6 or cache.shape[3] != 1 or 2 not in cache.shape[:2]:
                raise ValueError(
                    f"KV cache of shape {list(cache.shape)} is neither blocks-first "
                    "[NB, 2, NH, 1, BS, HS] nor K/V-first [2, NB, NH, 1, BS, HS]"
                )
        if _block_axis(tensors[0]) == 1:
            return EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS, kv_caches
        if HAS_BLOCKS_FIRST:
            return BLOCKS_FIRST, kv_caches
        squeezed: DiscoverableKVCache = [cache.squeeze(3) for cache in tensors]
        return BLOCKS_FIRST, squeezed


def _require_transfer_settings(cache: object) -> None:
    """Refuse bad settings of RBLN transfers: registration detects, so start-up stops.

    Not when LMCache is imported: its CLI and its server never transfer.
    """
    if isinstance(cache, torch.Tensor) and cache.device.type == "rbln":
        settings.require_valid()
        # Also where the shape tells: with fewer blocks the next start would need it.
        _axis_setting()


def _block_axis(cache: torch.Tensor) -> int:
    """Return the axis of the blocks, 0 or 1."""
    if cache.shape[0] != 2:
        return 0
    if cache.shape[1] != 2:
        return 1
    # vLLM-RBLN only answers while it builds a model, which is when the caches are
    # registered. Stores ask again from other threads, perhaps while another model is
    # built: they get the first answer. New caches have a new storage.
    storage = cache.untyped_storage()
    key = storage._cdata
    known = _known_axes.get(key)
    if known is not None and known[0]() is storage:
        return known[1]
    axis = _ask_vllm_rbln()
    if axis is None:
        axis = _axis_setting()
    if axis is None:
        raise ValueError(
            f"KV cache of shape {list(cache.shape)} has two blocks, so its shape does "
            "not tell blocks-first from K/V-first, and vLLM-RBLN can't be asked here; "
            f"set {LAYOUT_ENV_VAR}=blocks_first (vLLM-RBLN's default) or kv_first "
            "(custom kernels), or give the cache more blocks"
        )
    for address, (reference, _) in list(_known_axes.items()):
        if reference() is None:
            _known_axes.pop(address, None)
    _known_axes[key] = (weakref.ref(storage), axis)
    return axis


def _ask_vllm_rbln() -> int | None:
    """Return vLLM-RBLN's block axis, or None where it has no current model."""
    if importlib.util.find_spec("vllm_rbln") is None:
        return None
    try:
        # Third Party
        from vllm_rbln.config import get_rbln_config
        from vllm_rbln.v1.attention.kv_cache_bindings import attention_block_axis

        return int(attention_block_axis(get_rbln_config().use_custom_kernel))
    except (ImportError, AttributeError, AssertionError, RuntimeError):
        # Another vLLM-RBLN, or no model under construction in this thread.
        return None


def _axis_setting() -> int | None:
    """Return the block axis that ``LMCACHE_RBLN_KV_LAYOUT`` names, if it is set."""
    raw = os.environ.get(LAYOUT_ENV_VAR, "").strip().lower()
    if not raw:
        return None
    if raw not in _LAYOUT_BLOCK_AXIS:
        raise ValueError(
            f"{LAYOUT_ENV_VAR}={raw!r} is unknown; use "
            f"{' or '.join(_LAYOUT_BLOCK_AXIS)}"
        )
    return _LAYOUT_BLOCK_AXIS[raw]
