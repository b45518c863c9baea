# SPDX-License-Identifier: Apache-2.0
"""Few blocks, a small CPU tier, late copies: nothing is lost, mixed up or leaked."""

# Standard
from typing import Any
import http.client
import json

# Third Party
import pytest

# First Party
from tests.campaigns import client_fuzz
from tests.e2e.inprocess.engines import (
    EnginePool,
    InProcessEngine,
    check_nothing_is_held,
)
from tests.e2e.messages import assert_logged
from tests.support.serving.servers import HOST

CHUNK = 256
PREEMPTIONS = "vllm:num_preemptions_total"
RUNNING = "vllm:num_requests_running"


@pytest.fixture
def engine(engines: EnginePool) -> InProcessEngine:
    return engines.get("small")


class OpenRequest:
    """A request whose answer is not waited for."""

    def __init__(
        self, engine: InProcessEngine, prompt: list[int], new: int, **more: object
    ) -> None:
        body = {
            **more,
            "model": engine.engine.served_name,
            "prompt": prompt,
            "max_tokens": new,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        self._connection = http.client.HTTPConnection(HOST, engine.engine.port)
        self._connection.request(
            "POST",
            "/v1/completions",
            json.dumps(body),
            {"Content-Type": "application/json"},
        )

    def wait_first_token(self) -> None:
        """Wait until its answer begins."""
        assert self._connection.getresponse().readline()

    def abort(self) -> None:
        """Hang up."""
        assert self._connection.sock is not None
        self._connection.sock.close()
        self._connection.close()


@pytest.mark.parametrize("over", [-1, 0, 1, 60])
def test_warm_equals_cold(engine: InProcessEngine, over: int) -> None:
    prompt = engine.prompt(2 * CHUNK + over, ("warm", over))
    [cold] = engine.ask(prompt)
    before = engine.hits()
    [warm] = engine.ask(prompt)
    assert warm.token_ids == cold.token_ids
    whole = len(prompt) // CHUNK * CHUNK
    assert engine.hits() - before == min(whole, len(prompt) - 1)
    assert warm.cached_tokens == min(whole, len(prompt) - 1)


def test_several_at_once(engine: InProcessEngine) -> None:
    prompts = [engine.prompt(300 - 7 * i, ("several", i)) for i in range(4)]
    cold = engine.ask(*prompts)
    before = engine.hits()
    warm = engine.ask(*prompts)
    assert [c.token_ids for c in warm] == [c.token_ids for c in cold]
    assert engine.hits() - before == 4 * CHUNK
    check_nothing_is_held(engine)


def test_the_cpu_tier_forgets_the_oldest(engine: InProcessEngine) -> None:
    prompts = [engine.prompt(3 * CHUNK + 9, ("evict", i)) for i in range(4)]
    cold = [engine.ask(prompt)[0] for prompt in prompts]
    assert engine.state()["chunks"] <= 9
    before = engine.hits()
    [newest] = engine.ask(prompts[-1])
    assert engine.hits() - before == 3 * CHUNK
    [oldest] = engine.ask(prompts[0])
    assert engine.hits() - before == 3 * CHUNK, "the oldest was to be forgotten"
    assert [newest.token_ids, oldest.token_ids] == [
        cold[-1].token_ids,
        cold[0].token_ids,
    ]
    [again] = engine.ask(prompts[0])
    assert engine.hits() - before == 6 * CHUNK
    assert again.token_ids == cold[0].token_ids
    check_nothing_is_held(engine)


def test_preempted_requests_give_the_same_output(engine: InProcessEngine) -> None:
    # Alone each needs 4 of the 13 usable blocks; together they start with 12 and run
    # out when the answers grow past the third.
    prompts = [engine.prompt(380, ("preempted", i)) for i in range(4)]
    alone = [engine.ask(prompt, new_tokens=24)[0] for prompt in prompts]
    before = engine.count(PREEMPTIONS)
    for _ in range(5):
        together = engine.ask(*prompts, new_tokens=24)
        assert [c.token_ids for c in together] == [c.token_ids for c in alone]
        check_nothing_is_held(engine)
        if engine.count(PREEMPTIONS) > before:
            return
        # On a busy machine one of them may have come when another had ended.
    pytest.fail("no request was preempted")


def test_a_prefix_lost_after_its_lookup_is_recomputed(engine: InProcessEngine) -> None:
    prompt = engine.prompt(2 * CHUNK + 40, "lost")
    [cold] = engine.ask(prompt)
    engine.order("lose")
    [recomputed] = engine.ask(prompt)
    engine.check_obeyed("lose")
    assert recomputed.token_ids == cold.token_ids
    assert "Recovered from KV load failure: 1 request(s) rescheduled" in engine.log()
    # It is stored once more.
    before = engine.hits()
    [warm] = engine.ask(prompt)
    assert engine.hits() - before == 2 * CHUNK
    assert warm.token_ids == cold.token_ids
    check_nothing_is_held(engine)


def test_nothing_computed_on_a_lost_prefix_is_stored(engine: InProcessEngine) -> None:
    """The step after the lost one is on its way when the loss is known."""
    prefix = engine.prompt(2 * CHUNK, "spoilt")
    engine.ask([*prefix, 5], new_tokens=2)
    # Other blocks than the prefix was computed in.
    engine.ask(*(engine.prompt(300, ("between", i)) for i in range(3)))
    prompt = [*prefix, *engine.prompt(CHUNK + 130, "its tail")]
    engine.order("lose")
    [recomputed] = engine.ask(prompt)
    engine.check_obeyed("lose")
    before = engine.hits()
    [warm] = engine.ask(prompt)
    assert engine.hits() - before == 3 * CHUNK
    engine.order("lose")
    [again] = engine.ask(prompt)
    assert recomputed.token_ids == warm.token_ids == again.token_ids
    assert_logged("lost-prefix", engine.log())


def test_a_load_that_fails_half_way_is_recomputed(engine: InProcessEngine) -> None:
    prompt = engine.prompt(2 * CHUNK + 41, "failed load")
    [cold] = engine.ask(prompt)
    retrieved = engine.log().count("Retrieved ")
    engine.order("fail-load")
    [recomputed] = engine.ask(prompt)
    engine.check_obeyed("fail-load")
    assert recomputed.token_ids == cold.token_ids
    assert "KV not loaded: could not scatter KV of 2 chunks" in engine.log()
    assert_logged("failed-load", engine.log())
    assert engine.log().count("Retrieved ") == retrieved, "reported as a hit"
    check_nothing_is_held(engine)


def test_a_store_that_fails_half_way_leaves_nothing(engine: InProcessEngine) -> None:
    prompt = engine.prompt(CHUNK + 42, "failed store")
    engine.order("fail-store")
    [cold] = engine.ask(prompt)
    engine.check_obeyed("fail-store")
    assert "KV not stored: could not gather KV of 1 chunks" in engine.log()
    assert_logged("failed-store", engine.log())
    before = engine.hits()
    [again] = engine.ask(prompt)
    assert engine.hits() == before, "what was not stored is no hit"
    assert again.token_ids == cold.token_ids
    check_nothing_is_held(engine)


def test_abort_at_every_stage(engine: InProcessEngine) -> None:
    known = engine.prompt(3 * CHUNK + 30, "known")
    [cold] = engine.ask(known)

    # While it is answered.
    running = OpenRequest(engine, engine.prompt(6 * 128, "running"), 200)
    running.wait_first_token()
    engine.order("go-slow")  # so that it does not end before the other is seen waiting
    # While it waits for blocks, its chunks looked up and pinned.
    waiting = OpenRequest(engine, known, 4)
    engine.wait(lambda: engine.state()["lookups"] == 1, "the pins")
    waiting.abort()
    engine.wait(lambda: engine.state()["lookups"] == 0, "the release")
    engine.cancel("go-slow")
    running.abort()
    # While it is computed and stored.
    computed = OpenRequest(engine, engine.prompt(7 * 128, "computed"), 4)
    computed.abort()
    # While it is loaded.
    loaded = OpenRequest(engine, known, 4)
    loaded.abort()

    [warm] = engine.ask(known)
    assert warm.token_ids == cold.token_ids
    check_nothing_is_held(engine)


def cached(answer: dict[str, Any]) -> int:
    """Prompt tokens that were not computed."""
    details = answer["usage"]["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens") or 0)


def test_tenants_share_nothing(engine: InProcessEngine) -> None:
    prompt = engine.prompt(600, "tenants")
    salts: list[dict[str, str]] = [{"cache_salt": "A"}, {"cache_salt": "B"}, {}]
    cold = [engine.post(prompt, **salt) for salt in salts]
    assert [cached(answer) for answer in cold] == [0, 0, 0]
    warm = [engine.post(prompt, **salt) for salt in salts]
    assert [cached(answer) for answer in warm] == [2 * CHUNK] * 3
    answers = {str(answer["choices"][0]["token_ids"]) for answer in [*cold, *warm]}
    assert len(answers) == 1
    # A client's tags keep apart too, and 1 is not true.
    tags = [{"lmcache.tag.u": value} for value in (1, True, ["a"])]
    tagged = [engine.post(prompt, kv_transfer_params=tag) for tag in tags]
    assert [cached(answer) for answer in tagged] == [0, 0, 0]
    check_nothing_is_held(engine)


@pytest.mark.parametrize(
    "odd",
    [
        {"kv_transfer_params": {"lmcache.tag.u": ["a"]}},
        {"kv_transfer_params": {"disagg_spec": {}}},
        {"kv_transfer_params": {"ret_first_tok": 1}},
        {"kv_transfer_params": {"lmcache.skip_save": "perhaps"}},
        {"vllm_xargs": {"kv_transfer_params": 5}},
        {"vllm_xargs": {"kv_transfer_params": "ret_first_tok"}},
    ],
    ids=lambda odd: str(odd).translate({ord(c): None for c in "{}[]' "}),
)
def test_a_client_s_parameters_end_nothing(
    engine: InProcessEngine, odd: dict[str, Any]
) -> None:
    prompt = engine.prompt(300, "odd parameters")
    [plain] = engine.ask(prompt, new_tokens=4)
    answer = engine.post(prompt, **odd)
    assert tuple(answer["choices"][0]["token_ids"]) == plain.token_ids
    # The client hangs up before the first token.
    engine.order("go-slow")
    hasty = OpenRequest(engine, engine.prompt(7 * 128, "hasty"), 100, **odd)
    engine.wait(lambda: engine.count(RUNNING) == 1, "the request")
    hasty.abort()
    engine.cancel("go-slow")
    check_nothing_is_held(engine)
    if odd == {"kv_transfer_params": {"disagg_spec": {}}}:
        assert_logged("odd-request", engine.log())


def test_a_few_clients_as_they_should_not_be(engine: InProcessEngine) -> None:
    """The campaign's first requests; all of it is run by hand."""
    options = client_fuzz.parse(["--requests", "30"])
    done = client_fuzz.send_all(engine.engine.port, options)
    assert sum(done.values()) == 30
    client_fuzz.wait_idle(engine.engine)
    check_nothing_is_held(engine)
