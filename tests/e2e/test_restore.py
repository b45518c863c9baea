# SPDX-License-Identifier: Apache-2.0
"""What comes back from LMCache is what went in, byte by byte."""

# Third Party
import pytest

# First Party
from tests.e2e.kv_blocks import StoredChunk, assert_same_blocks, chunks_of
from tests.e2e.stack import Stack

LAYOUTS = pytest.mark.parametrize(
    "stack", ["blocks-first", "kv-first", "mla"], indirect=True
)


@LAYOUTS
def test_layout_is_the_one_meant(stack: Stack) -> None:
    blocks = stack.config.num_blocks
    shapes = {
        "blocks-first": f"({blocks}, 2, ",
        "kv-first": f"(2, {blocks}, ",
        "mla": f"({blocks}, 128, ",
    }
    lines = [
        line for line in stack.engine.process.log().splitlines() if "KV_PROBE" in line
    ]
    assert lines
    for line in lines:
        assert shapes[stack.config.name] in line
        assert "rbln:0" in line


@LAYOUTS
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_warm_equals_cold_around_whole_chunks(stack: Stack, over: int) -> None:
    length = 3 * stack.config.chunk_size + over
    prompt = stack.prompt(length, ("chunks", over))

    [cold] = stack.cold([prompt])
    before = stack.hits()
    [warm] = stack.warm([prompt])

    assert warm.token_ids == cold.token_ids
    whole = length // stack.config.chunk_size * stack.config.chunk_size
    # vLLM computes the last token of a prompt itself, even if all are restored.
    expected = min(whole, length - 1)
    assert stack.hits() - before == expected
    assert warm.cached_tokens == expected
    assert_same_blocks(stack.stored_blocks(prompt), stack.restored_blocks(prompt))


@LAYOUTS
def test_several_prompts_at_once(stack: Stack) -> None:
    prompts = [stack.prompt(300 - 7 * i, ("several", i)) for i in range(4)]

    cold = stack.cold(prompts)
    before = stack.hits()
    warm = stack.warm(prompts)

    assert [c.token_ids for c in warm] == [c.token_ids for c in cold]
    chunk = stack.config.chunk_size
    expected = [len(prompt) // chunk * chunk for prompt in prompts]
    assert [c.cached_tokens for c in warm] == expected
    assert stack.hits() - before == sum(expected)
    for prompt in prompts:
        assert_same_blocks(stack.stored_blocks(prompt), stack.restored_blocks(prompt))


@LAYOUTS
def test_longer_prompt_restores_the_part_it_shares(stack: Stack) -> None:
    chunk = stack.config.chunk_size
    prompt = stack.prompt(2 * chunk + 5, "shared")
    longer = prompt[: 2 * chunk] + stack.prompt(chunk + 40, "tail")

    stack.cold([prompt])
    before = stack.hits()
    stack.forget_local()
    [first] = stack.ask([longer], new_chunks=1)
    assert stack.hits() - before == 2 * chunk
    [second] = stack.warm([longer])

    assert second.token_ids == first.token_ids
    assert stack.hits() - before == 2 * chunk + 3 * chunk
    shared = stack.stored_blocks(prompt)
    assert_same_blocks(
        shared, stack.restored_blocks(longer)[:, : shared.shape[1]].contiguous()
    )


@LAYOUTS
def test_server_keeps_token_major_chunks(stack: Stack) -> None:
    """The wire layout is LMCache's own, so that other devices can restore it."""
    prompt = stack.prompt(2 * stack.config.chunk_size, "wire")
    stack.cold([prompt])
    segment = stack.cache.segment
    assert segment is not None
    chunks = chunks_of(stack.stored_blocks(prompt), stack.config.blocks_per_chunk)
    assert len(chunks) == 2
    for chunk in chunks:
        StoredChunk(segment, chunk)  # refuses bytes that are not there
