# SPDX-License-Identifier: Apache-2.0
"""Rolling back after a load that failed."""

# Standard
from types import SimpleNamespace
from typing import Any

# Third Party
import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request, RequestStatus

# First Party
from lmcache_rbln.integration.vllm.recovery import UnloadedBlocks, roll_back

pytestmark = pytest.mark.npu


class Blocks:
    def __init__(self) -> None:
        self.evicted: set[int] = set()

    def evict_blocks(self, blocks: set[int]) -> None:
        self.evicted |= blocks


def request(status: str = "RUNNING", computed: int = 41, in_flight: int = 1) -> Any:
    return SimpleNamespace(
        status=RequestStatus[status],
        num_computed_tokens=computed,
        num_in_flight_tokens=in_flight,
        num_stale_output_tokens=0,
        drop_stale_output=False,
        num_output_placeholders=in_flight,
        spec_token_ids=[-1],
    )


def rolled_back(
    requests: dict[str, Any],
    blocks: dict[str, list[int]],
    invalid: set[int],
    given_up: list[list[int]] | None = None,
) -> set[int]:
    pool: Any = Blocks()
    roll_back(requests, blocks, given_up or [], invalid, 10, pool)
    return pool.evicted


def test_a_request_is_computed_again_from_its_first_unloaded_block() -> None:
    one = request()
    assert rolled_back({"r": one}, {"r": [7, 5, 3, 9]}, {3, 9}) == {3, 9}
    assert one.num_computed_tokens == 20
    assert one.num_stale_output_tokens == 1
    assert one.drop_stale_output
    assert one.num_output_placeholders == 0
    assert one.spec_token_ids == []


def test_one_that_shares_the_block_is_too() -> None:
    first, second = request(), request(computed=35, in_flight=3)
    blocks = {"a": [7, 5], "b": [7, 5, 8]}
    assert rolled_back({"a": first, "b": second}, blocks, {5}) == {5, 8}
    assert (first.num_computed_tokens, second.num_computed_tokens) == (10, 10)
    assert second.num_stale_output_tokens == 3


def test_what_was_not_computed_is_not_called_computed() -> None:
    one = request(computed=0, in_flight=0)
    rolled_back({"r": one}, {"r": [7, 5]}, {5})
    assert one.num_computed_tokens == 0


@pytest.mark.parametrize("status", ["WAITING", "PREEMPTED", "FINISHED_ABORTED"])
def test_others_are_left_alone(status: str) -> None:
    other, untouched = request(status), request()
    blocks = {"a": [5], "b": [6], "gone": [5]}
    # The block and what may stand behind it are no prefix of anybody's any more.
    assert rolled_back({"a": other, "b": untouched}, blocks, {5}) == {5}
    assert vars(other) == vars(request(status))
    assert vars(untouched) == vars(request())


def test_prefixes_of_requests_that_ended_meanwhile_go_too() -> None:
    """A client hangs up while its load fails; its tracker may be gone as well."""
    evicted = rolled_back({}, {"preempted": [1, 5, 9]}, {5}, [[4, 5, 6], [7, 8]])
    assert evicted == {5, 9, 6}


@pytest.mark.parametrize("ends", ["aborted", "aborted a step ago", "preempted"])
def test_nobody_hits_a_block_that_was_never_loaded(ends: str) -> None:
    """With vLLM's own block pool and prefix cache."""
    size = 16
    init_none_hash(sha256)
    spec = FullAttentionSpec(
        block_size=size, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    manager = KVCacheManager(
        KVCacheConfig(20, [], [KVCacheGroupSpec(["layer"], spec)]),
        max_model_len=512,
        scheduler_block_size=size,
        hash_block_size=size,
        enable_caching=True,
    )

    def new(name: str) -> Request:
        return Request(
            name,
            list(range(70)),
            SamplingParams(max_tokens=9),
            None,
            block_hasher=get_request_block_hasher(size, sha256),
        )

    first = new("first")
    found = manager.get_computed_blocks(first)[0]
    manager.allocate_slots(
        first,
        6,
        num_new_computed_tokens=0,
        new_computed_blocks=found,
        num_external_computed_tokens=64,
    )
    [blocks] = manager.get_block_ids("first")
    status = "PREEMPTED" if ends == "preempted" else "FINISHED_ABORTED"
    first.status = RequestStatus[status]
    manager.free(first)
    held = {} if ends == "aborted a step ago" else {"first": list(blocks)}
    given_up = [list(blocks)] if ends == "aborted a step ago" else []
    roll_back({}, held, given_up, set(blocks[1:3]), size, manager)
    hit = manager.get_computed_blocks(new("second"))[1]
    assert hit <= size


def test_blocks_stay_unloaded_until_the_scheduler_knows() -> None:
    unloaded = UnloadedBlocks(10)
    spoilt: Any = SimpleNamespace(slot_mapping=torch.arange(30, 50))
    sound: Any = SimpleNamespace(slot_mapping=torch.arange(0, 30))
    assert not unloaded.touches(spoilt)
    unloaded.add({4, 6})
    assert unloaded.touches(spoilt)
    assert not unloaded.touches(sound)
    unloaded.clear([6])
    assert unloaded.touches(spoilt)
    unloaded.clear([4])
    assert not unloaded.touches(spoilt)
