# SPDX-License-Identifier: Apache-2.0
"""A model of full attention beside sliding windows is restored whole."""

# Third Party
import pytest

# First Party
from lmcache.v1.platform.devices.rbln.lmcache_release import HAS_GROUPS
from tests.e2e.clear_prompts import clear_prompts
from tests.e2e.stack import BLOCK_SIZE, Stack
from tests.support.serving.servers import transport_of

pytestmark = [
    pytest.mark.sim,
    pytest.mark.skipif(not HAS_GROUPS, reason="LMCache 0.5.6 moves one group"),
]

NEW_TOKENS = 6
#: Three chunks of the larger size with tokens behind, and a whole number of chunks.
LENGTHS = (6 * BLOCK_SIZE + 40, 4 * BLOCK_SIZE)


@pytest.mark.parametrize(
    ("stack", "transport"),
    [("hybrid", "SHM"), ("hybrid-inline", "pickle")],
    indirect=["stack"],
)
def test_full_attention_beside_windows(stack: Stack, transport: str) -> None:
    """As transformers answers, which has no cache, before and after."""
    clear = clear_prompts(stack.engine.config.model, LENGTHS, 2, NEW_TOKENS)
    prompts = [prompt.tokens for prompt in clear]

    cold = stack.cold(prompts, NEW_TOKENS)
    before = stack.hits()
    warm = stack.warm(prompts, NEW_TOKENS)

    assert transport_of(stack.engine.process.log()) == transport
    wanted = [prompt.answer for prompt in clear]
    assert [completion.token_ids for completion in cold] == wanted
    assert [completion.token_ids for completion in warm] == wanted
    # vLLM computes the last token of a prompt itself, even if all are restored.
    chunk = stack.config.chunk_size
    restored = [min(len(p) // chunk * chunk, len(p) - 1) for p in prompts]
    assert [completion.cached_tokens for completion in warm] == restored
    assert stack.hits() - before == sum(restored)
