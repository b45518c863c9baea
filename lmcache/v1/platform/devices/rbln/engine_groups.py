# SPDX-License-Identifier: Apache-2.0
"""Which of an engine's KV cache groups RBLN transfers can move.

A transfer takes the id of a scheduler block for one block of each layer's tensor. That
holds for full attention, and for a sliding window whose tensor has the scheduler's
blocks. vLLM-RBLN's own window (``RBLNSlidingWindowSpec``) is another thing: one block a
request, shifted in place. LMCache's connector refuses it by its name.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

# First Party
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.utils import (
    get_block_size,
    normalize_kv_and_discover_format,
)
from lmcache.v1.platform.devices.rbln.lmcache_release import HAS_GROUPS

if TYPE_CHECKING:
    # First Party
    from lmcache.v1.multiprocess.group_view import EngineGroupInfo

_FIX = "serve this model without --kv-transfer-config"


def require_movable(
    kv_caches: Mapping[str, Any], groups: Sequence[EngineGroupInfo]
) -> None:
    """Refuse groups that transfers can't move.

    Args:
        kv_caches: KV tensor by layer name.
        groups: The engine's groups; none if it reports none, which is one of full
            attention.

    Raises:
        ValueError: If a group keeps recurrent state, or a sliding window with no other
            group beside it, or its tensors have blocks of another size than the
            scheduler's. With LMCache 0.5.6 also if there are several.
    """
    if len(groups) > 1 and not HAS_GROUPS:
        kinds = ", ".join(_kind(group) for group in groups)
        raise ValueError(
            f"hybrid models are not supported on RBLN: the KV cache has {len(groups)} "
            f"groups ({kinds}), wanted one of full attention; {_FIX}, or with LMCache "
            "0.5.7"
        )
    for index, group in enumerate(groups):
        layers = [list(kv_caches)[layer] for layer in group.layer_indices]
        name = f"KV cache group {index} ({', '.join(layers)}): {_kind(group)}"
        # LMCache stores a lone group whole, null blocks included.
        if group.recurrent_state or (group.sw_size_tokens >= 0 and len(groups) == 1):
            raise ValueError(
                f"{name} is not supported on RBLN, wanted full attention; {_FIX}"
            )
        wanted = group.tokens_per_block
        if not wanted:
            continue
        kv_format, normalized = normalize_kv_and_discover_format(
            [kv_caches[layer] for layer in layers], EngineType.VLLM
        )
        got = get_block_size(normalized, kv_format)
        if got != wanted:
            raise ValueError(
                f"{name} has blocks of {got} tokens, wanted the scheduler's block size "
                f"{wanted}; start vLLM with --block-size {got}, or {_FIX}"
            )


def _kind(group: EngineGroupInfo) -> str:
    """Say what a group keeps."""
    if group.recurrent_state:
        return "recurrent state (MambaSpec)"
    if group.sw_size_tokens >= 0:
        return (
            f"a sliding window of {group.sw_size_tokens} tokens (SlidingWindowSpec, "
            "RBLNSlidingWindowSpec)"
        )
    return f"full attention in blocks of {group.tokens_per_block} tokens"
