# SPDX-License-Identifier: Apache-2.0
"""What a client sends as ``kv_transfer_params`` ends no multiprocess engine."""

# Future
from __future__ import annotations

# Standard
from types import SimpleNamespace
from typing import Any

# Third Party
import pytest

TOKENS = list(range(64))


def tracker(params: dict[str, Any]) -> Any:
    """LMCache's view of a request of 64 tokens that are all computed."""
    metadata = pytest.importorskip("lmcache.integration.vllm.lmcache_mp_metadata")
    found = metadata.LMCacheMPRequestTracker(
        SimpleNamespace(
            request_id="a request",
            cache_salt=None,
            sampling_params=SimpleNamespace(extra_args={"kv_transfer_params": params}),
            all_token_ids=TOKENS,
            prompt_token_ids=TOKENS,
            num_prompt_tokens=len(TOKENS),
        )
    )
    found.append_block_ids(([1, 2, 3, 4],))
    found.increase_num_scheduled_tokens(len(TOKENS))
    return found


def stored_tokens(params: dict[str, Any]) -> int:
    metadata = pytest.importorskip("lmcache.integration.vllm.lmcache_mp_metadata")
    store = metadata.LMCacheMPRequestMetadata.GetStoreMetadata
    found = store(tracker(params), 16, [16])
    return 0 if found is None else found.op.end


@pytest.mark.parametrize(
    "value", ["32", 32.5, float("nan"), [32], {"tokens": 32}, True, None], ids=repr
)
def test_a_limit_that_is_no_whole_number_is_ignored(value: object) -> None:
    assert stored_tokens({"lmcache.max_offload_tokens": value}) == 64


@pytest.mark.parametrize(("limit", "stored"), [(-5, 0), (0, 0), (40, 32), (10**30, 64)])
def test_a_limit_is_kept(limit: int, stored: int) -> None:
    assert stored_tokens({"lmcache.max_offload_tokens": limit}) == stored


@pytest.mark.parametrize("params", [{"cached_token_stats": True}, 5, ["x"], "x"])
def test_a_request_that_was_never_looked_up_or_brings_no_object(params: object) -> None:
    """A client that hung up while its request waited, or used ``vllm_xargs``."""
    connectors = pytest.importorskip("lmcache.integration.vllm.lmcache_mp_connector")
    connector = connectors.LMCacheMPConnector.__new__(connectors.LMCacheMPConnector)
    connector.request_trackers = {}
    connector.lazy_offload = False
    connector._can_store = True
    connector._loading = set()
    ended: list[str] = []
    connector.scheduler_adapter = SimpleNamespace(
        cleanup_lookup_result=ended.append, end_session=ended.append
    )
    request = SimpleNamespace(request_id="a request", kv_transfer_params=params)
    assert connector.request_finished(request, []) == (True, None)
    assert ended == ["a request"] * 2
