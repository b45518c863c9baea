# SPDX-License-Identifier: Apache-2.0
"""Which of an engine's KV cache groups RBLN transfers can move.

A transfer takes the id of a scheduler block for one block of each layer's tensor. That
holds for full attention. A sliding window is kept otherwise: vLLM-RBLN's tensor has one
window a block (``RBLNSlidingWindowSpec``, and vLLM's ``SlidingWindowSpec`` without
sub-block prefix caching), and vLLM puts the null block where the window has passed.
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

if TYPE_CHECKING:
    # First Party
    from lmcache.v1.multiprocess.group_view import EngineGroupInfo

_FIX = "serve this model without --kv-transfer-config"


def require_full_attention(
    kv_caches: Mapping[str, Any], groups: Sequence[EngineGroupInfo]
) -> None:
    """Refuse everything but one group of full attention in the scheduler's blocks.

    Args:
        kv_caches: KV tensor by layer name.
        groups: The engine's groups; none if it reports none, which is one of full
            attention.

    Raises:
        ValueError: If there are several groups, or the group keeps a sliding window or
            recurrent state, or its tensors have blocks of another size.
    """
    if len(groups) > 1:
        kinds = ", ".join(_kind(group) for group in groups)
        raise ValueError(
            f"hybrid models are not supported on RBLN: the KV cache has {len(groups)} "
            f"groups ({kinds}), wanted one of full attention; {_FIX}"
        )
    for group in groups:
        if group.recurrent_state or group.sw_size_tokens >= 0:
            raise ValueError(
                f"{_kind(group)} is not supported on RBLN, wanted full attention; "
                f"{_FIX}"
            )
        wanted = group.tokens_per_block
        if not wanted:
            continue
        kv_format, layers = normalize_kv_and_discover_format(
            list(kv_caches.values()), EngineType.VLLM
        )
        got = get_block_size(layers, kv_format)
        if got != wanted:
            raise ValueError(
                f"the KV cache has blocks of {got} tokens, wanted the scheduler's "
                f"block size {wanted}; start vLLM with --block-size {got}, or {_FIX}"
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
