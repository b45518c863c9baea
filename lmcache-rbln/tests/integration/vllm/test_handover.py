# SPDX-License-Identifier: Apache-2.0
"""LMCache gets copies: whatever it does, vLLM's own objects stay as they were."""

# Standard
from types import SimpleNamespace
from typing import Any
import copy
import logging
import random

# Third Party
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_side import Lookup, scheduler_side
import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request, RequestStatus
import torch

# First Party
from lmcache.integration.vllm.utils import (
    apply_mm_hashes_to_token_ids,
    extract_mm_features,
)
from lmcache_rbln.integration.vllm import handover
from lmcache_rbln.integration.vllm.handover import view_of

pytestmark = pytest.mark.npu

BLOCK, CHUNK = 4, 8


def request_of(name: str, tokens: int, params: Any = None, **more: Any) -> Any:
    extra = None if params is None else {"kv_transfer_params": params}
    return Request(
        name,
        list(range(tokens)),
        SamplingParams(max_tokens=99, extra_args=extra),
        None,
        **more,
    )


def plain(value: Any) -> Any:
    """A deep copy of everything in it that LMCache could change."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, set):
        return set(value)
    if type(value).__module__.startswith("vllm.v1") and hasattr(value, "__dict__"):
        return {name: plain(item) for name, item in vars(value).items()}
    return value


class Engine:
    """vLLM's scheduler and model runner in one process, as far as lists are shared.

    Args:
        connector: Under test.
        chance: Decides everything.
    """

    def __init__(self, connector: Any, chance: random.Random) -> None:
        self.connector = connector
        self.chance = chance
        self.requests: dict[str, Any] = {}
        self.running: list[str] = []
        self.preempted: list[str] = []
        #: As the scheduler knows them, and as the model runner does.
        self.blocks: dict[str, list[int]] = {}
        self.runner: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self.outputs: list[tuple[Any, Any]] = []
        self.next_block = 1

    def call(self, hook: str, *arguments: Any) -> Any:
        """Call a hook; nothing of vLLM's may change by it."""
        before = plain([*self.requests.values(), *arguments])
        result = getattr(self.connector, hook)(*arguments)
        assert plain([*self.requests.values(), *arguments]) == before, hook
        return result

    def grow(self, name: str, tokens: int) -> tuple[list[int], ...] | None:
        """Allocate what is missing for this many tokens."""
        own = self.blocks[name]
        count = -(-tokens // BLOCK) - len(own)
        new = list(range(self.next_block, self.next_block + count))
        self.next_block += count
        own += new
        return (new,) if new else None

    def admit(self, name: str) -> tuple[int, Any]:
        """Look a waiting request up; returns tokens to compute and its blocks."""
        request = self.requests[name]
        self.blocks[name] = []
        lookup = self.connector._lmcache_engine.lookup_client
        lookup.hit = self.chance.randrange(0, 40)
        external, _ = self.call("get_num_new_matched_tokens", request, 0)
        request.num_computed_tokens = external
        new = self.chance.randint(1, request.num_tokens - external)
        blocks = self.grow(name, external + new)
        held = SimpleNamespace(get_block_ids=lambda: (list(self.blocks[name]),))
        self.call("update_state_after_alloc", request, held, external)
        return new, blocks

    def step(self) -> None:
        """Schedule one step and run it."""
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = self.finished
        scheduled = output.num_scheduled_tokens
        running = [name for name in self.running if self.chance.random() < 0.8]
        waiting = [name for name in self.requests if name not in self.blocks]
        self.chance.shuffle(waiting)
        cached = CachedRequestData.make_empty()
        for name in running:
            request = self.requests[name]
            left = request.num_tokens - request.num_computed_tokens
            scheduled[name] = self.chance.randint(1, left)
            ends = request.num_computed_tokens + scheduled[name]
            cached.req_ids.append(name)
            cached.new_block_ids.append(self.grow(name, ends))
        for name in waiting[: self.chance.randint(0, 2)]:
            scheduled[name], blocks = self.admit(name)
            if name in self.preempted:
                self.preempted.remove(name)
                cached.req_ids.append(name)
                cached.new_block_ids.append(blocks)
                cached.resumed_req_ids.add(name)
                cached.all_token_ids[name] = self.requests[name].all_token_ids.copy()
            else:
                output.scheduled_new_reqs.append(
                    NewRequestData.from_request(self.requests[name], blocks)
                )
            self.running.append(name)
        for name in cached.req_ids:
            cached.num_computed_tokens.append(self.requests[name].num_computed_tokens)
            cached.num_output_tokens.append(self.requests[name].num_output_tokens)
        output.scheduled_cached_reqs = cached
        self.metadata = self.call("build_connector_meta", output)
        self.finished = set()
        self.outputs.append((output, plain(output)))
        self.run(output)
        self.check()

    def run(self, output: Any) -> None:
        """Take the step's lists, as a model runner does, and extend them."""
        for new in output.scheduled_new_reqs:
            self.runner[new.req_id] = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                # The very list, as vllm-rbln's runner takes it.
                self.runner[name] = blocks[0]
            elif blocks:
                self.runner[name].extend(blocks[0])
        for name, count in output.num_scheduled_tokens.items():
            request = self.requests[name]
            request.num_computed_tokens += count
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids(7)

    def check(self) -> None:
        """All three know the same blocks."""
        trackers = self.connector._lmcache_engine._request_trackers
        for name in self.running:
            assert self.runner[name] == self.blocks[name]
            if name in trackers:
                assert trackers[name].allocated_block_ids == self.blocks[name]
                tokens = self.requests[name].all_token_ids
                assert (
                    trackers[name].token_ids
                    == list(tokens)[: len(trackers[name].token_ids)]
                )

    def preempt(self, name: str) -> None:
        """Take a request's blocks away."""
        self.running.remove(name)
        self.preempted.append(name)
        self.blocks.pop(name)
        self.requests[name].num_computed_tokens = 0
        self.requests[name].status = RequestStatus.PREEMPTED

    def finish(self, name: str) -> None:
        """End a request in whatever state it is."""
        self.requests[name].status = RequestStatus.FINISHED_ABORTED
        blocks = self.blocks.pop(name, [])
        result = self.call("request_finished", self.requests.pop(name), blocks)
        assert result == (False, None)
        self.finished.add(name)
        self.running = [other for other in self.running if other != name]
        self.preempted = [other for other in self.preempted if other != name]


PARAMS: tuple[Any, ...] = (
    None,
    {},
    {"disagg_spec": {}},
    {"ret_first_tok": 1},
    {"lmcache.tag.u": ["a"]},
    {"lmcache.tag.u": object()},
    {"lmcache.skip_save": "yes"},
    "ret_first_tok",
    5,
)


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_vllm_s_objects_stay_as_they_were(seed: int) -> None:
    chance = random.Random(seed)
    engine = Engine(scheduler_side(Lookup(CHUNK), BLOCK, CHUNK), chance)
    for number in range(40):
        act = chance.random()
        if act < 0.2:
            name = f"r{number}"
            engine.requests[name] = request_of(
                name, chance.randint(1, 40), chance.choice(PARAMS), cache_salt="t"
            )
        elif act < 0.3 and engine.running:
            engine.preempt(chance.choice(engine.running))
        elif act < 0.4 and engine.requests:
            engine.finish(chance.choice(list(engine.requests)))
        else:
            engine.step()
    for name in list(engine.requests):
        engine.finish(name)
    engine.step()
    inner = engine.connector._lmcache_engine
    for left in (
        engine.connector._views,
        inner._unfinished_requests,
        inner._request_trackers,
        inner._requests_priority,
        inner.load_specs,
    ):
        assert not left
    resumed = [o for o, _ in engine.outputs if o.scheduled_cached_reqs.resumed_req_ids]
    assert len(engine.outputs) > 5, resumed


def test_a_resumed_request_s_blocks_are_not_shared() -> None:
    """The line that made one answer wrong: LMCache keeps and extends the list."""
    engine = Engine(scheduler_side(Lookup(CHUNK), BLOCK, CHUNK), random.Random(1))
    engine.requests["r"] = request_of("r", 20)
    engine.chance = SimpleNamespace(  # type: ignore[assignment]
        random=lambda: 0.0,
        randint=lambda low, high: high,
        randrange=lambda low, high: 0,
        shuffle=lambda names: None,
    )
    engine.step()
    engine.preempt("r")
    for _ in range(12):
        engine.step()
    assert engine.runner["r"] == engine.blocks["r"]
    assert len(engine.blocks["r"]) > 6


def test_identity_reaches_lookup_load_and_store() -> None:
    connector = scheduler_side(Lookup(CHUNK), BLOCK, CHUNK)
    engine = Engine(connector, random.Random(0))
    params = {"lmcache.skip_save": True, "disagg_spec": {}, "lmcache.tag.u": 1}
    names = {"a": "tenant-A", "b": "tenant-B", "none": None}
    for name, salt in names.items():
        engine.requests[name] = request_of(name, 20, params, cache_salt=salt)
    engine.requests["plain"] = request_of("plain", 20)
    while len(engine.running) < 4:
        engine.step()
    asked = dict(connector._lmcache_engine.lookup_client.asked)
    trackers = connector._lmcache_engine._request_trackers
    tag = "lmcache.tag.rbln_identity"
    assert len({asked[name][tag] for name in names}) == 3
    for name in names:
        assert trackers[name].request_configs == {
            tag: asked[name][tag],
            "lmcache.skip_save": True,
        }
    assert asked["plain"] is None and trackers["plain"].request_configs is None


def adapter(name: str) -> Any:
    return LoRARequest(name, 1, f"/adapters/{name}")


def test_adapters_are_kept_apart() -> None:
    """vllm-rbln refuses LoRA today; nothing opens when it serves it."""
    found = {
        view.terms.identity
        for lora in (None, adapter("a"), adapter("b"))
        for salt in (None, "a")
        if (
            view := view_of(
                request_of("r", 8, None, lora_request=lora, cache_salt=salt)
            )
        )
    }
    assert len(found) == 6


def test_embeddings_are_kept_out(caplog: pytest.LogCaptureFixture) -> None:
    """Their tokens are placeholders, which LMCache would take for equal prompts."""
    connector = scheduler_side(Lookup(CHUNK), BLOCK, CHUNK)
    request = request_of("r", 8, None, prompt_embeds=torch.zeros(8, 2))
    request.prompt_token_ids = None
    handover.logger.propagate = True
    with caplog.at_level(logging.WARNING):
        assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
        connector.update_state_after_alloc(request, None, 0)
    assert not connector._lmcache_engine.lookup_client.asked
    assert [r.getMessage() for r in caplog.records].count(
        "[req_id=r] not cached: its prompt is embeddings, which LMCache can't key"
    ) == 1
    assert connector.request_finished(request, []) == (False, None)


def test_images_are_told_apart_by_lmcache() -> None:
    """It puts their hashes in place of their tokens, so they need no tag."""

    def tokens(identifier: str, offset: int) -> tuple[int, ...]:
        feature = MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=identifier,
            mm_position=PlaceholderRange(offset=offset, length=8),
        )
        view: Any = view_of(request_of("r", 20, mm_features=[feature]))
        ids = torch.tensor([5] * 20)
        apply_mm_hashes_to_token_ids(ids, *extract_mm_features(view))
        return tuple(ids.tolist())

    seen = {tokens(name, offset) for name in ("cat", "dog") for offset in (0, 4)}
    assert len(seen) == 4
    assert tokens("cat", 4) in seen


def test_a_view_can_only_be_read() -> None:
    request = request_of("r", 8, {"ret_first_tok": 1})
    view: Any = view_of(request)
    assert view.kv_transfer_params is None
    assert request.kv_transfer_params == {"ret_first_tok": 1}
    request.num_computed_tokens = 5
    assert view.num_computed_tokens == 5
    with pytest.raises(AttributeError):
        view.num_computed_tokens = 0
    assert copy.copy(request.num_computed_tokens) == 5


def test_a_recovery_reaches_vllm_s_request() -> None:
    connector = scheduler_side(Lookup(CHUNK), BLOCK, CHUNK)
    engine = Engine(connector, random.Random(3))
    engine.requests["r"] = request_of("r", 20)
    while not engine.running:
        engine.step()
    request = engine.requests["r"]
    request.status = RequestStatus.RUNNING
    connector.update_connector_output(
        SimpleNamespace(invalid_block_ids={engine.blocks["r"][0]})
    )
    assert request.num_computed_tokens == 0


def test_under_the_policy_fail_the_workers_learn_of_unloaded_blocks_too() -> None:
    """They would keep these blocks from being stored for ever."""
    connector = scheduler_side(Lookup(CHUNK), BLOCK, CHUNK)
    connector._vllm_config.kv_transfer_config.kv_load_failure_policy = "fail"
    engine = Engine(connector, random.Random(3))
    engine.requests["r"] = request_of("r", 20)
    while not engine.running:
        engine.step()
    computed = engine.requests["r"].num_computed_tokens
    block = engine.blocks["r"][0]
    connector.update_connector_output(SimpleNamespace(invalid_block_ids={block}))
    # vLLM ends the request; nobody computes it again.
    assert engine.requests["r"].num_computed_tokens == computed
    assert connector._recovered_blocks == [block]
