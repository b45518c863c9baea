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
from collections.abc import Iterable, Mapping, Sequence
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
    from lmcache_rbln._lmcache import ReqMeta

logger = init_logger(__name__)


def roll_back(
    requests: Mapping[str, Request],
    held: Mapping[str, Sequence[int]],
    given_up: Iterable[Sequence[int]],
    invalid_blocks: set[int],
    block_size: int,
    kv_cache_manager: KVCacheManager | None,
) -> None:
    """Make the scheduler recompute every request over blocks that were not loaded.

    What an unloaded block and those behind it stand for in vLLM's prefix cache goes in
    any case: a request that was aborted or preempted meanwhile leaves them there.

    Args:
        requests: Those to compute again, by id.
        held: Blocks of each request, in the order of its tokens, by id.
        given_up: The same of requests that have ended since the load.
        invalid_blocks: Blocks that a load left without their KV.
        block_size: Tokens per block.
        kv_cache_manager: The scheduler's, to forget the blocks' prefixes.
    """
    spoilt = set(invalid_blocks)
    for blocks in (*held.values(), *given_up):
        spoilt.update(blocks[_first_of(invalid_blocks, blocks) :])
    if kv_cache_manager is not None:
        kv_cache_manager.evict_blocks(spoilt)
    for request_id, blocks in held.items():
        request = requests.get(request_id)
        if request is None or request.status != RequestStatus.RUNNING:
            continue
        first = _first_of(invalid_blocks, blocks)
        if first == len(blocks):
            continue
        request.num_computed_tokens = min(
            request.num_computed_tokens, first * block_size
        )
        # Steps on their way computed with these blocks; their tokens are dropped.
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.drop_stale_output = True
        request.num_output_placeholders = 0
        request.spec_token_ids = []


def _first_of(invalid_blocks: set[int], blocks: Sequence[int]) -> int:
    """Return the place of the first block without its KV, or behind the last."""
    places = (i for i, block in enumerate(blocks) if block in invalid_blocks)
    return next(places, len(blocks))


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
