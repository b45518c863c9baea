# SPDX-License-Identifier: Apache-2.0
"""What happens after a load that failed: recompute, and let no wrong KV out.

With asynchronous scheduling the step after the failed one is on its way before the
scheduler learns of the failure. It computes with what the load left in the blocks. vLLM
rolls the request back, but would still deliver that step's token, and leaves the blocks
in its prefix cache; and LMCache would store chunks computed on them.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

# Third Party
from vllm.v1.request import RequestStatus

# First Party
from lmcache.logging import init_logger

if TYPE_CHECKING:
    # Third Party
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    # First Party
    from lmcache.integration.vllm.vllm_v1_adapter import ReqMeta, RequestTracker

logger = init_logger(__name__)


def roll_back(
    requests: Mapping[str, Request],
    trackers: Mapping[str, RequestTracker],
    invalid_blocks: set[int],
    block_size: int,
    kv_cache_manager: KVCacheManager | None,
) -> None:
    """Make the scheduler recompute every request over blocks that were not loaded.

    Args:
        requests: Unfinished requests by id.
        trackers: LMCache's record of each request's blocks.
        invalid_blocks: Blocks that a load left without their KV.
        block_size: Tokens per block.
        kv_cache_manager: The scheduler's, to forget the blocks' prefixes.
    """
    for request_id, tracker in trackers.items():
        request = requests.get(request_id)
        if request is None or request.status != RequestStatus.RUNNING:
            continue
        blocks = tracker.allocated_block_ids
        first = next((i for i, b in enumerate(blocks) if b in invalid_blocks), None)
        if first is None:
            continue
        request.num_computed_tokens = min(
            request.num_computed_tokens, first * block_size
        )
        # Steps on their way computed with these blocks; their tokens are dropped.
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.drop_stale_output = True
        request.num_output_placeholders = 0
        request.spec_token_ids = []
        if kv_cache_manager is not None:
            kv_cache_manager.evict_blocks(set(blocks[first:]))


class UnloadedBlocks:
    """A worker's blocks without their KV, until the scheduler rolled back."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: set[int] = set()

    def add(self, blocks: Iterable[int]) -> None:
        """Note blocks that a load left without their KV."""
        self._blocks.update(blocks)

    def clear(self, blocks: Iterable[int]) -> None:
        """Forget blocks whose requests the scheduler rolled back."""
        self._blocks.difference_update(blocks)

    def touches(self, request: ReqMeta) -> bool:
        """Tell whether what a request computed may rest on such a block."""
        if not self._blocks:
            return False
        blocks = (request.slot_mapping // self._block_size).unique().tolist()
        return not self._blocks.isdisjoint(blocks)
