# SPDX-License-Identifier: Apache-2.0
"""The documented launch with a CPU tier: KV cache sized at run time, exact hits."""

# Third Party
import pytest

# First Party
from tests.e2e.inprocess.engines import DOCUMENTED_ENV, EnginePool, InProcessEngine
from tests.support.documents import EXTENSION_PAGE, launch
from tests.support.serving.servers import HOST
import json
import re
import urllib.error
import urllib.request

CHUNK = 1024
LOCAL_HITS = "vllm:prefix_cache_hits_total"
COUNTERS = (
    "lmcache:num_stored_tokens_total",
    "lmcache:num_requested_tokens_total",
    "lmcache:num_hit_tokens_total",
    "lmcache:num_lookup_tokens_total",
)


@pytest.fixture
def engine(engines: EnginePool) -> InProcessEngine:
    return engines.get("documented")


def evict_npu_cache(engine: InProcessEngine) -> None:
    """Empty vLLM's own prefix cache."""
    request = urllib.request.Request(
        f"http://{HOST}:{engine.engine.port}/reset_prefix_cache", method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.status == 200


def test_it_is_the_launch_of_the_document(engine: InProcessEngine) -> None:
    """Word for word but for the model, and for what tests add."""
    [_, *documented] = launch(EXTENSION_PAGE).command("vllm", "serve")
    started = engine.engine.process.command
    transfer = json.loads(documented.pop())
    assert json.loads(started[started.index(documented[-1]) + 1]) == transfer
    flags = [at for at, word in enumerate(documented) if word.startswith("--")]
    for at, end in zip(flags, [*flags[1:], len(documented)], strict=True):
        place = started.index(documented[at])
        assert started[place : place + end - at] == documented[at:end]
    assert DOCUMENTED_ENV.items() <= engine.env.items()


@pytest.mark.parametrize(
    "asks",
    [{"prompt_logprobs": 0}, {"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}],
)
def test_a_request_that_vllm_rbln_does_not_survive_is_refused(
    engine: InProcessEngine, asks: dict[str, object]
) -> None:
    prompt = engine.prompt(40, "prompt logprobs")
    body = {"model": engine.engine.served_name, "prompt": prompt, "max_tokens": 2}
    request = urllib.request.Request(
        f"http://{HOST}:{engine.engine.port}/v1/completions",
        json.dumps(body | asks).encode(),
        {"Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=120)
    assert refused.value.code == 400
    assert "is not supported by vllm-rbln 0.12" in refused.value.read().decode()
    engine.ask(prompt)


def test_kv_cache_is_sized_after_warm_up(engine: InProcessEngine) -> None:
    log = engine.log()
    found = re.search(r"reallocating KV cache: 4 -> (\d+)", log)
    assert found
    registered = re.search(r"KV cache on rbln:0: 2 layers of (\d+) blocks of 1024", log)
    assert registered
    assert registered.group(1) == found.group(1)
    assert log.index("reallocating KV cache") < log.index("KV cache on rbln:0")
    assert "KV cache registration is final" in log
    assert "degraded mode" not in log


def test_a_prefix_comes_back_after_the_npu_evicted_it(engine: InProcessEngine) -> None:
    prompt = engine.prompt(2 * CHUNK + 200, "evicted")
    hits, local = engine.hits(), engine.count(LOCAL_HITS)
    counted = {name: engine.count(name) for name in COUNTERS}

    [cold] = engine.ask(prompt)
    assert engine.hits() == hits
    # The last of the prompt's chunks is stored at its end, all as they fill up.
    assert engine.log().count(f"Stored {CHUNK} out of total {CHUNK} tokens") >= 2

    [again] = engine.ask(prompt)
    assert again.token_ids == cold.token_ids
    assert engine.hits() == hits, "the NPU's own cache comes first"
    assert engine.count(LOCAL_HITS) > local

    evict_npu_cache(engine)
    [warm] = engine.ask(prompt)
    assert warm.token_ids == cold.token_ids
    assert warm.cached_tokens == 2 * CHUNK
    assert engine.hits() - hits == 2 * CHUNK
    retrieved = f"Retrieved {2 * CHUNK} out of {2 * CHUNK} required tokens"
    assert retrieved in engine.log()

    # LMCache publishes every ten seconds.
    wanted = dict(
        zip(COUNTERS, [2 * CHUNK, 2 * CHUNK, 2 * CHUNK, 6 * CHUNK], strict=True)
    )
    engine.wait(
        lambda: (
            {name: engine.count(name) - before for name, before in counted.items()}
            == wanted
        ),
        f"LMCache's counters move by {wanted}",
    )


@pytest.mark.parametrize("over", [0, 1])
def test_whole_chunks(engine: InProcessEngine, over: int) -> None:
    prompt = engine.prompt(CHUNK + over, ("whole", over))
    [cold] = engine.ask(prompt)
    evict_npu_cache(engine)
    before = engine.hits()
    [warm] = engine.ask(prompt)
    assert warm.token_ids == cold.token_ids
    # vLLM computes the last token of a prompt itself, even if all are restored.
    assert engine.hits() - before == CHUNK + over - 1


def test_a_longer_prompt_restores_the_part_that_the_npu_lacks(
    engine: InProcessEngine,
) -> None:
    """The NPU holds the first block, LMCache the first two."""
    long = engine.prompt(2 * CHUNK + 50, "skip")
    [cold] = engine.ask(long)
    evict_npu_cache(engine)
    engine.ask(long[: CHUNK + 10])
    before, local = engine.hits(), engine.count(LOCAL_HITS)
    [warm] = engine.ask(long)
    assert warm.token_ids == cold.token_ids
    assert engine.count(LOCAL_HITS) - local == CHUNK
    assert engine.hits() - before == CHUNK


def test_the_larger_of_sub_block_match_and_lmcache_is_taken(
    engine: InProcessEngine,
) -> None:
    """The NPU holds the start of a block, LMCache all of it: counted once."""
    prompt = engine.prompt(CHUNK + 30, "sub-block")
    [cold] = engine.ask(prompt)
    evict_npu_cache(engine)
    start = prompt[:600] + engine.prompt(20, "other tail")
    engine.ask(start)
    before, local = engine.hits(), engine.count(LOCAL_HITS)
    [warm] = engine.ask(prompt)
    assert warm.token_ids == cold.token_ids
    assert engine.hits() - before == CHUNK
    assert engine.count(LOCAL_HITS) == local
    assert warm.cached_tokens == CHUNK
