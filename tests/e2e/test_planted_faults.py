# SPDX-License-Identifier: Apache-2.0
"""Other bytes in the server's memory make other answers."""

# Standard
from collections.abc import Iterator
from contextlib import contextmanager

# Third Party
import pytest
import torch

# First Party
from tests.e2e.kv_blocks import StoredChunk, chunks_of
from tests.e2e.stack import Stack

Chunks = list[torch.Tensor]


@contextmanager
def planted(stack: Stack, originals: Chunks, faulty: Chunks) -> Iterator[None]:
    """Replace chunks in the server's memory for a while."""
    segment = stack.cache.segment
    assert segment is not None
    stored = [StoredChunk(segment, chunk) for chunk in originals]
    try:
        for place, chunk in zip(stored, faulty, strict=True):
            place.write(chunk)
        yield
    finally:
        for place in stored:
            place.repair()


@pytest.mark.parametrize("stack", ["blocks-first", "kv-first", "mla"], indirect=True)
def test_corrupted_store_changes_the_output(stack: Stack) -> None:
    """Otherwise equal outputs would prove nothing: KV could be ignored."""
    prompt = stack.prompt(3 * stack.config.chunk_size + 3, "corrupted")
    [cold] = stack.cold([prompt])
    chunks = chunks_of(stack.stored_blocks(prompt), stack.config.blocks_per_chunk)

    with planted(stack, chunks, [torch.zeros_like(chunk) for chunk in chunks]):
        [warm] = stack.warm([prompt])
        assert warm.cached_tokens == 3 * stack.config.chunk_size
        assert warm.token_ids != cold.token_ids

    [repaired] = stack.warm([prompt])
    assert repaired.token_ids == cold.token_ids
