# SPDX-License-Identifier: Apache-2.0
"""MLA with chunks of any length, beside the NPU's own cache; no warm-up."""

# Third Party
import pytest

# First Party
from tests.e2e.inprocess.engines import EnginePool, InProcessEngine

CHUNK = 256
BLOCK = 128
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


@pytest.mark.parametrize("tokens", [CHUNK + 40, CHUNK + BLOCK, CHUNK + BLOCK + 100])
def test_a_partial_last_chunk(engine: InProcessEngine, tokens: int) -> None:
    prompt = engine.prompt(tokens, ("partial", tokens))
    [cold] = engine.ask(prompt)
    fill_npu_cache(engine, ("fill", tokens))
    before = engine.hits()
    [warm] = engine.ask(prompt)
    assert warm.token_ids == cold.token_ids
    # All of it is stored; vLLM computes the last token of a prompt itself.
    assert engine.hits() - before == tokens - 1


def test_a_sub_block_match_cancels_the_load(engine: InProcessEngine) -> None:
    """LMCache offers 100 tokens of a block, the NPU 64 or more of another request's."""
    prompt = engine.prompt(100, "tie")
    [cold] = engine.ask(prompt)
    fill_npu_cache(engine, "tie")
    longer = engine.prompt(0, "") + prompt + engine.prompt(20, "tail")
    engine.ask(longer)
    before, local = engine.hits(), engine.count(LOCAL_HITS)
    [warm] = engine.ask([*prompt[:64], *engine.prompt(90, "another tail")])
    assert warm.cached_tokens == (engine.hits() - before) + (
        engine.count(LOCAL_HITS) - local
    )
    [again] = engine.ask(prompt)
    assert again.token_ids == cold.token_ids
