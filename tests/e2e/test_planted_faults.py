# SPDX-License-Identifier: Apache-2.0
"""The byte check of the other tests can fail: faults planted in the server's memory."""

# Standard
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Third Party
import pytest
import torch

# First Party
from tests.e2e.kv_blocks import StoredChunk, assert_same_blocks, chunks_of
from tests.e2e.stack import BLOCK_SIZE, Stack

Chunks = list[torch.Tensor]
STANDARD = ["blocks-first", "kv-first"]


def swap_heads(chunks: Chunks, heads: int) -> Chunks:
    """Exchange the heads of every token."""
    return [chunk.unflatten(-1, (heads, -1)).flip(-2).flatten(-2) for chunk in chunks]


def swap_k_and_v(chunks: Chunks, heads: int) -> Chunks:
    """Exchange the K and the V plane."""
    return [chunk.flip(0) for chunk in chunks]


def shift_tokens(chunks: Chunks, heads: int) -> Chunks:
    """Move every token by one place."""
    return [chunk.roll(1, dims=-2) for chunk in chunks]


def exchange_blocks(chunks: Chunks, heads: int) -> Chunks:
    """Exchange the first blocks of the first two chunks."""
    first, second = chunks[0].clone(), chunks[1].clone()
    first[..., :BLOCK_SIZE, :] = chunks[1][..., :BLOCK_SIZE, :]
    second[..., :BLOCK_SIZE, :] = chunks[0][..., :BLOCK_SIZE, :]
    return [first, second, *chunks[2:]]


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


def check_fault_is_caught(stack: Stack, fault: Callable[[Chunks, int], Chunks]) -> None:
    """Plant a fault, see the byte check fail, repair it, see the check pass."""
    prompt = stack.prompt(2 * stack.config.chunk_size + 9, fault.__name__)
    [cold] = stack.cold([prompt])
    blocks = stack.stored_blocks(prompt)
    chunks = chunks_of(blocks, stack.config.blocks_per_chunk)
    faulty = fault(chunks, blocks.shape[3])
    assert not all(map(torch.equal, chunks, faulty)), "the fault changes nothing"

    with planted(stack, chunks, faulty):
        stack.warm([prompt])
        with pytest.raises(AssertionError, match="bytes differ"):
            assert_same_blocks(blocks, stack.restored_blocks(prompt))

    [repaired] = stack.warm([prompt])
    assert_same_blocks(blocks, stack.restored_blocks(prompt))
    assert repaired.token_ids == cold.token_ids


@pytest.mark.parametrize("stack", STANDARD, indirect=True)
@pytest.mark.parametrize(
    "fault", [swap_heads, swap_k_and_v, shift_tokens, exchange_blocks]
)
def test_fault_is_caught(stack: Stack, fault: Callable[[Chunks, int], Chunks]) -> None:
    check_fault_is_caught(stack, fault)


@pytest.mark.parametrize("stack", ["mla"], indirect=True)
@pytest.mark.parametrize("fault", [shift_tokens, exchange_blocks])
def test_fault_is_caught_with_mla(
    stack: Stack, fault: Callable[[Chunks, int], Chunks]
) -> None:
    check_fault_is_caught(stack, fault)


@pytest.mark.parametrize("stack", [*STANDARD, "mla"], indirect=True)
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
