# SPDX-License-Identifier: Apache-2.0
"""MLA with chunks that are not full, beside the NPU's own cache; no warm-up.

The connector is inside of vLLM's ``MultiConnector``.
"""

# Third Party
import pytest

# First Party
from tests.e2e.inprocess.engines import (
    EnginePool,
    InProcessEngine,
    check_nothing_is_held,
)

CHUNK = 256
BLOCK = 128
SUB_BLOCK = 64  # tokens computed in one step
LOCAL_HITS = "vllm:prefix_cache_hits_total"


@pytest.fixture
def engine(engines: EnginePool) -> InProcessEngine:
    return engines.get("partial")


def fill_npu_cache(engine: InProcessEngine, seed: object) -> None:
    """Make the NPU forget every other prefix."""
    for number in range(2):
        engine.ask(engine.prompt(7 * BLOCK, (seed, number)), new_tokens=2)


def test_registered_but_never_finalized(engine: InProcessEngine) -> None:
    assert "KV cache on rbln:0: 2 layers of 14 blocks" in engine.log()
    assert "KV cache registration is final" not in engine.log()


@pytest.mark.parametrize("tokens", [40, BLOCK, CHUNK - 6])
def test_a_prompt_shorter_than_a_chunk(engine: InProcessEngine, tokens: int) -> None:
    prompt = engine.prompt(tokens, ("partial", tokens))
    [cold] = engine.ask(prompt)
    fill_npu_cache(engine, ("fill", tokens))
    before = engine.hits()
    [warm] = engine.ask(prompt)
    assert warm.token_ids == cold.token_ids
    # All of it is stored; vLLM computes the last token of a prompt itself.
    assert engine.hits() - before == tokens - 1


def test_the_larger_of_sub_block_match_and_lmcache_is_taken(
    engine: InProcessEngine,
) -> None:
    """The NPU offers 64 tokens of another request's block, LMCache all but one."""
    prompt = engine.prompt(100, "larger")
    [cold] = engine.ask(prompt)
    fill_npu_cache(engine, "larger")
    engine.ask(prompt[:SUB_BLOCK] + engine.prompt(30, "tail"))
    before, local = engine.hits(), engine.count(LOCAL_HITS)
    [warm] = engine.ask(prompt)
    assert warm.token_ids == cold.token_ids
    assert engine.hits() - before == 99
    assert engine.count(LOCAL_HITS) == local
    assert warm.cached_tokens == 99


def test_a_sub_block_match_wins_a_tie(engine: InProcessEngine) -> None:
    """The NPU holds a block and 64 tokens, LMCache offers as many behind the block."""
    prompt = engine.prompt(BLOCK + SUB_BLOCK + 1, "tie")
    [cold] = engine.ask(prompt)
    before, local = engine.hits(), engine.count(LOCAL_HITS)
    [warm] = engine.ask(prompt)
    assert warm.token_ids == cold.token_ids
    assert warm.cached_tokens == BLOCK + SUB_BLOCK
    assert engine.hits() == before, "counted for both"
    assert engine.count(LOCAL_HITS) - local == BLOCK + SUB_BLOCK
    check_nothing_is_held(engine)  # nor by the lookup of what was not loaded


def test_inside_multi_connector_a_load_that_fails_is_recomputed(
    engine: InProcessEngine,
) -> None:
    prompt = engine.prompt(CHUNK + 40, "failed load")
    [cold] = engine.ask(prompt)
    fill_npu_cache(engine, "failed load")
    engine.order("fail-load")
    [recomputed] = engine.ask(prompt)
    engine.check_obeyed("fail-load")
    assert recomputed.token_ids == cold.token_ids
    check_nothing_is_held(engine)
    fill_npu_cache(engine, "loaded again")
    before = engine.hits()
    [warm] = engine.ask(prompt)
    assert warm.token_ids == cold.token_ids
    # Behind a whole chunk of an earlier step LMCache stores no rest.
    assert engine.hits() - before == CHUNK
