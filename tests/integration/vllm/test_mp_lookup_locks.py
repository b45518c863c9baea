# SPDX-License-Identifier: Apache-2.0
"""Chunks that a lookup locked are released, whatever becomes of the request."""

# Future
from __future__ import annotations

# Standard
from types import SimpleNamespace
from typing import Any

# Third Party
import pytest

BLOCK, CHUNK = 128, 256
PROMPT = list(range(2 * CHUNK + 10))


class Server:
    """The scheduler's way to a server that has found some chunks."""

    lmcache_tokens_per_chunk = CHUNK

    def __init__(self, found: int | None) -> None:
        self.found = found
        self.freed: list[tuple[int, int]] = []
        self.asked = 0

    def maybe_submit_lookup_request(self, *_: Any, **__: Any) -> None:
        self.asked += 1

    def check_lookup_result(self, request_id: str) -> int | None:
        return self.found

    def free_lookup_locks(self, start: int, end: int, **_: Any) -> None:
        self.freed.append((start, end))

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@pytest.fixture
def request_() -> Any:
    """A request of vLLM that waits to be admitted."""
    vllm_request = pytest.importorskip("vllm.v1.request")
    return SimpleNamespace(
        request_id="a request",
        cache_salt="tenant-A",
        sampling_params=None,
        all_token_ids=PROMPT,
        prompt_token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=0,
        status=vllm_request.RequestStatus.WAITING,
        kv_transfer_params=None,
        skip_reading_prefix_cache=False,
    )


def connector(server: Server) -> Any:
    connectors = pytest.importorskip("lmcache.integration.vllm.lmcache_mp_connector")
    found = connectors.LMCacheMPConnector.__new__(connectors.LMCacheMPConnector)
    parts: dict[str, Any] = {
        "scheduler_adapter": server,
        "request_trackers": {},
        "lazy_offload": False,
        "_can_store": True,
        "_reserve_last_token_for_lookup": False,
        "_hit_alignment_tokens": BLOCK,
        "_connector_stats": connectors.LMCacheMPConnectorStats(),
    }
    for name, part in parts.items():
        setattr(found, name, part)
    return found


def blocks(count: int) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (list(range(1, count + 1)),))


def test_a_load_that_a_sub_block_match_cancelled(request_: Any) -> None:
    """vLLM-RBLN takes the NPU's own copy in place of it: nothing is to be loaded."""
    server = Server(2 * CHUNK)
    ours = connector(server)
    assert ours.get_num_new_matched_tokens(request_, 0) == (2 * CHUNK, True)
    assert server.freed == []
    ours.update_state_after_alloc(request_, blocks(5), 0)
    assert server.freed == [(0, 2 * CHUNK)]
    ours.request_finished(request_, [])
    assert server.freed == [(0, 2 * CHUNK)], "released twice"


def test_a_load_behind_what_the_npu_has(request_: Any) -> None:
    server = Server(2 * CHUNK)
    ours = connector(server)
    assert ours.get_num_new_matched_tokens(request_, CHUNK) == (CHUNK, True)
    ours.update_state_after_alloc(request_, blocks(5), CHUNK)
    # The worker releases the rest when it has loaded it.
    assert server.freed == [(0, CHUNK)]
    ours.request_finished(request_, [])
    assert server.freed == [(0, CHUNK)]


def test_a_request_aborted_while_it_waits_for_blocks(request_: Any) -> None:
    server = Server(2 * CHUNK)
    ours = connector(server)
    for _ in range(3):  # vLLM asks again in every step
        ours.get_num_new_matched_tokens(request_, BLOCK)
    ours.request_finished(request_, [])
    assert server.freed == [(0, 2 * CHUNK)]


@pytest.mark.parametrize("found", [0, None], ids=["nothing found", "no answer yet"])
def test_a_request_aborted_with_nothing_locked(
    request_: Any, found: int | None
) -> None:
    server = Server(found)
    ours = connector(server)
    ours.get_num_new_matched_tokens(request_, 0)
    ours.request_finished(request_, [])
    assert server.freed == []


def test_a_request_that_needs_its_whole_prompt_computed(request_: Any) -> None:
    """As prompt log-probabilities do."""
    server = Server(2 * CHUNK)
    ours = connector(server)
    request_.skip_reading_prefix_cache = True
    assert ours.get_num_new_matched_tokens(request_, 0) == (0, False)
    ours.update_state_after_alloc(request_, blocks(5), 0)
    ours.request_finished(request_, [])
    assert (server.asked, server.freed) == (0, [])
