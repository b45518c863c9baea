# SPDX-License-Identifier: Apache-2.0
"""What becomes of a request that was looked up: its locks, and its blocks."""

# Future
from __future__ import annotations

# Standard
from types import SimpleNamespace
from typing import Any

# Third Party
import pytest

# First Party
from lmcache.v1.multiprocess.futures import MessagingFuture

BLOCK, CHUNK = 128, 256
PROMPT = list(range(2 * CHUNK + 10))
ALL = ("free", 0, 2 * CHUNK)
END = ("end", "a request")


class Client:
    """A server that has found some chunks, as LMCache's scheduler talks to it.

    Args:
        found: Chunks found; None while it is still looking.
        slow: What it answers only when the test does, in place of it.
    """

    def __init__(self, found: int | None, *slow: str) -> None:
        self._found = found
        self._slow = slow
        self.calls: list[tuple[Any, ...]] = []
        self.waiting: list[MessagingFuture[Any]] = []

    def lookup(self, key: Any, tp_size: int) -> MessagingFuture[None]:
        self.calls.append(("lookup",))
        return self._answer("lookup", None)

    def query_prefetch_status(self, request_id: str) -> MessagingFuture[int | None]:
        return self._answer("status", self._found)

    def free_lookup_locks(
        self, key: Any, tp_size: int, extra_ranges: tuple[Any, ...] = ()
    ) -> MessagingFuture[None]:
        assert not extra_ranges
        assert key.cache_salt == "tenant-A"
        self.calls.append(("free", key.start, key.end))
        return self._answer("free", None)

    def end_session(self, request_id: str) -> MessagingFuture[None]:
        self.calls.append(("end", request_id))
        return self._answer("end", None)

    def _answer(self, operation: str, value: Any) -> MessagingFuture[Any]:
        future: MessagingFuture[Any] = MessagingFuture()
        if operation in self._slow:
            self.waiting.append(future)
        else:
            future.set_result(value)
        return future


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
        resumable=False,
        skip_reading_prefix_cache=False,
    )


def connector(*clients: Client) -> Any:
    """LMCache's connector and scheduler adapter, without their threads."""
    servers = {f"tcp://server-{i}": client for i, client in enumerate(clients)}
    connectors = pytest.importorskip("lmcache.integration.vllm.lmcache_mp_connector")
    adapter = connectors.LMCacheMPSchedulerAdapter.__new__(
        connectors.LMCacheMPSchedulerAdapter
    )
    strategy = SimpleNamespace(kv_world_size=1, kv_tp_size=1, num_kv_readers=1)
    healthy = SimpleNamespace(is_set=lambda: True)
    found = connectors.LMCacheMPConnector.__new__(connectors.LMCacheMPConnector)
    parts: dict[Any, dict[str, Any]] = {
        adapter: {
            "req_clients": servers,
            "model_name": "model",
            "parallel_strategy": strategy,
            "lmcache_tokens_per_chunk": CHUNK,
            "_mq_timeout": 300.0,
            "_nonblocking_lookup_status": True,
            "_server_urls": list(servers),
            "_health_events": dict.fromkeys(servers, healthy),
            "_heartbeats": {},
            "_pending_lookups": set(),
            "_unacked_lookups": {},
            "_finished_lookup_results": {},
            "_per_server_hits": {},
            "_lookup_status": {},
            "_lookup_params": {},
            "_lookups": {},  # in place of the last six, since LMCache 0.5.7
            "_freed_lookups": {},
        },
        found: {
            "scheduler_adapter": adapter,
            "request_trackers": {},
            "_role": connectors.KVConnectorRole.SCHEDULER,
            "_eager_prefetch": True,
            "lazy_offload": False,
            "_can_store": True,
            "_reserve_last_token_for_lookup": False,
            "_hit_alignment_tokens": BLOCK,
            "_group_tokens_per_block": [BLOCK],
            "_loading": set(),
            "_ended_loads": set(),
            "_connector_stats": connectors.LMCacheMPConnectorStats(),
        },
    }
    for target, attributes in parts.items():
        for name, value in attributes.items():
            setattr(target, name, value)
    return found


def blocks(count: int) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (list(range(1, count + 1)),))


def test_a_load_that_a_sub_block_match_cancelled(request_: Any) -> None:
    """vLLM-RBLN takes the NPU's own copy in place of it: nothing is to be loaded."""
    client = Client(2)
    ours = connector(client)
    assert ours.get_num_new_matched_tokens(request_, 0) == (2 * CHUNK, True)
    ours.update_state_after_alloc(request_, blocks(5), 0)
    ours.request_finished(request_, [])
    assert client.calls == [("lookup",), ALL, END]


def test_a_load_behind_what_the_npu_has(request_: Any) -> None:
    client = Client(2)
    ours = connector(client)
    assert ours.get_num_new_matched_tokens(request_, CHUNK) == (CHUNK, True)
    ours.update_state_after_alloc(request_, blocks(5), CHUNK)
    ours.request_finished(request_, [])
    # The worker releases the rest when it has loaded it.
    assert client.calls == [("lookup",), ("free", 0, CHUNK), END]


def test_a_request_aborted_while_it_waits_for_blocks(request_: Any) -> None:
    client = Client(2)
    ours = connector(client)
    for _ in range(3):  # vLLM asks again in every step
        ours.get_num_new_matched_tokens(request_, BLOCK)
    ours.request_finished(request_, [])
    assert client.calls == [("lookup",), ALL, END]


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("slow", [[], ["lookup"], ["status"]], ids=str)
def test_a_request_aborted_before_the_result_is_known(
    slow: list[str], lost: bool, request_: Any
) -> None:
    """The server gets everything in order, and the scheduler waits for nothing."""
    client = Client(None, *slow, "free")

    def answer() -> None:
        [waiting], client.waiting = client.waiting, []
        if lost:
            waiting.set_exception(TimeoutError("the server is lost"))
        else:
            waiting.set_result(None)

    ours = connector(client)
    assert ours.get_num_new_matched_tokens(request_, 0) == (None, True)
    ours.request_finished(request_, [])
    if slow:
        assert client.calls == [("lookup",)]
        answer()
    assert client.calls == [("lookup",), ALL]
    answer()
    assert client.calls == [("lookup",), ALL, END]
    assert not ours.scheduler_adapter._freed_lookups


def test_a_request_aborted_before_it_was_looked_up(request_: Any) -> None:
    client = Client(2)
    connector(client).request_finished(request_, [])
    assert client.calls == [END]


def test_servers_of_which_one_has_more(request_: Any) -> None:
    more, less = Client(2), Client(1)
    ours = connector(more, less)
    assert ours.get_num_new_matched_tokens(request_, 0) == (CHUNK, True)
    ours.request_finished(request_, [])
    both = ("free", 0, CHUNK)
    assert more.calls == [("lookup",), ("free", CHUNK, 2 * CHUNK), both, END]
    assert less.calls == [("lookup",), both, END]


def test_a_request_that_needs_its_whole_prompt_computed(request_: Any) -> None:
    """As prompt log-probabilities do."""
    client = Client(2)
    ours = connector(client)
    request_.skip_reading_prefix_cache = True
    ours.on_new_request(request_)
    assert ours.get_num_new_matched_tokens(request_, 0) == (0, False)
    ours.update_state_after_alloc(request_, blocks(5), 0)
    ours.request_finished(request_, [])
    assert client.calls == [END]


def step(ours: Any) -> Any:
    """What the worker is told in a step in which nothing is computed."""
    cached = SimpleNamespace(req_ids=[], resumed_req_ids=set())
    scheduled = SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=cached, preempted_req_ids=set()
    )
    return ours.build_connector_meta(scheduled)


def load(ours: Any, request: Any) -> None:
    """Let a request be admitted, and its load be submitted."""
    ours.get_num_new_matched_tokens(request, 0)
    ours.update_state_after_alloc(request, blocks(5), 2 * CHUNK)
    assert [meta.direction for meta in step(ours).requests] == ["RETRIEVE"]


def loaded(*request_ids: str) -> Any:
    """What all workers have reported."""
    return SimpleNamespace(
        finished_recving=set(request_ids),
        kv_cache_events=None,
        kv_connector_worker_meta=None,
    )


def test_a_request_that_ends_while_it_loads_is_reported_as_loaded_only(
    request_: Any,
) -> None:
    """vLLM frees its blocks then, and knows no such request afterwards."""
    ours = connector(Client(2))
    load(ours, request_)
    ours.update_connector_output(loaded("another"))
    ours.request_finished(request_, [])
    assert step(ours).ended_loads == {"a request"}
    assert step(ours).ended_loads == set()
    ours.update_connector_output(loaded("a request"))
    assert not ours._loading


def test_a_request_that_ends_when_it_has_loaded_is_reported_as_ever(
    request_: Any,
) -> None:
    ours = connector(Client(2))
    load(ours, request_)
    ours.update_connector_output(loaded("a request"))
    ours.request_finished(request_, [])
    assert step(ours).ended_loads == set()
