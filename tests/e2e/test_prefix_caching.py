# SPDX-License-Identifier: Apache-2.0
"""LMCache beside the NPU's own cache, which is on where the user does not say no."""

# Standard
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
import json
import time

# Third Party
import pytest

# First Party
from tests.e2e.kv_blocks import assert_same_blocks
from tests.e2e.stack import BLOCK_SIZE, Stack
from tests.support.serving.client import RequestFailedError

BOTH = pytest.mark.parametrize("stack", ["blocks-first", "kv-first"], indirect=True)
SUB_BLOCKS = pytest.mark.parametrize("stack", ["kv-first"], indirect=True)
SUB_BLOCK = 64  # tokens computed in one step
USED = "vllm:kv_cache_usage_perc"


@BOTH
def test_engine_runs_as_documented(stack: Stack) -> None:
    command = stack.engine.process.command
    assert not [word for word in command if "prefix-caching" in word]
    log = stack.engine.process.log()
    assert "enable_prefix_caching=True" in log
    finds_parts = stack.config.max_batched_tokens < BLOCK_SIZE
    assert ("Sub-block prefix caching enabled" in log) == finds_parts


@BOTH
def test_what_is_on_the_npu_is_not_loaded(stack: Stack) -> None:
    chunk = stack.config.chunk_size
    prompt = stack.prompt(2 * chunk + 5, "on the NPU")
    [cold] = stack.cold([prompt])
    before, local = stack.hits(), stack.local_hits()
    loads = len(stack.transfers())
    # Whatever the lookup locked is released: `ask` waits for that.
    [warm] = stack.ask([prompt])
    assert warm.token_ids == cold.token_ids
    assert warm.cached_tokens == 2 * chunk
    assert stack.local_hits() - local == 2 * chunk
    assert stack.hits() == before, "counted for both"
    assert len(stack.transfers()) == loads, "loaded although it was there"


@BOTH
def test_the_rest_is_loaded_behind_what_is_on_the_npu(stack: Stack) -> None:
    chunk = stack.config.chunk_size
    prompt = stack.prompt(2 * chunk + 5, "both")
    [cold] = stack.cold([prompt])
    stored = stack.stored_blocks(prompt)
    stack.forget_local()
    # Loads the first chunk; its blocks stay on the NPU.
    stack.ask([prompt[:chunk] + stack.prompt(20, "another tail")])
    before, local = stack.hits(), stack.local_hits()
    [warm] = stack.ask([prompt])
    assert warm.token_ids == cold.token_ids
    assert warm.cached_tokens == 2 * chunk
    assert (stack.local_hits() - local, stack.hits() - before) == (chunk, chunk)
    load = stack.transfers()[-1]
    assert (load.direction, load.start, load.end) == ("RETRIEVE", chunk, 2 * chunk)
    assert_same_blocks(stored[:, stack.config.blocks_per_chunk :], load.blocks)


@SUB_BLOCKS
def test_lmcache_is_taken_where_the_npu_has_less(stack: Stack) -> None:
    """The NPU offers 64 tokens of another request's block, LMCache a whole chunk."""
    prompt = stack.prompt(BLOCK_SIZE + 20, "larger")
    [cold] = stack.cold([prompt])
    stack.forget_local()
    tail = stack.prompt(BLOCK_SIZE, "other tail")
    stack.ask([prompt[:SUB_BLOCK] + tail], new_chunks=1)
    before, local = stack.hits(), stack.local_hits()
    [warm] = stack.ask([prompt])
    assert warm.token_ids == cold.token_ids
    assert warm.cached_tokens == BLOCK_SIZE
    assert (stack.local_hits() - local, stack.hits() - before) == (0, BLOCK_SIZE)


@SUB_BLOCKS
def test_a_part_of_a_block_is_taken_where_lmcache_has_nothing(stack: Stack) -> None:
    """LMCache keeps whole chunks, so behind the last one only the NPU has anything."""
    prompt = stack.prompt(BLOCK_SIZE + SUB_BLOCK + 1, "part")
    [cold] = stack.cold([prompt])
    before, local = stack.hits(), stack.local_hits()
    [warm] = stack.ask([prompt])
    assert warm.token_ids == cold.token_ids
    assert warm.cached_tokens == BLOCK_SIZE + SUB_BLOCK
    assert stack.local_hits() - local == BLOCK_SIZE + SUB_BLOCK
    assert stack.hits() == before


@BOTH
def test_tenants_share_nothing(stack: Stack) -> None:
    chunk = stack.config.chunk_size
    prompt = stack.prompt(2 * chunk + 5, "tenants")
    stack.forget_local()
    answers = set()
    for tenant in ("tenant-A", "tenant-B", None):
        # Nobody else's KV, neither the NPU's nor LMCache's: all chunks are new.
        [first] = stack.ask([prompt], new_chunks=2, cache_salt=tenant)
        assert first.cached_tokens == 0
        answers.add(first.token_ids)
    for tenant in ("tenant-A", "tenant-B", None):
        stack.forget_local()
        before = stack.hits()
        [again] = stack.ask([prompt], cache_salt=tenant)
        assert again.cached_tokens == stack.hits() - before == 2 * chunk
        answers.add(again.token_ids)
    assert len(answers) == 1


@BOTH
def test_a_load_that_fails_is_computed_again(stack: Stack) -> None:
    prompt = stack.prompt(2 * stack.config.chunk_size + 5, "failed load")
    [cold] = stack.cold([prompt])
    stack.fail_next_load()
    [recomputed] = stack.warm([prompt])
    assert recomputed.token_ids == cold.token_ids
    assert "planted failure of the NPU" in stack.engine.process.log()
    before = stack.hits()
    [warm] = stack.warm([prompt])
    assert warm.token_ids == cold.token_ids
    assert stack.hits() - before == 2 * stack.config.chunk_size


@pytest.mark.parametrize("stack", ["mla"], indirect=True)
def test_a_load_that_fails_ends_its_request_alone(stack: Stack) -> None:
    prompt = stack.prompt(2 * stack.config.chunk_size + 5, "failed load")
    [cold] = stack.cold([prompt])
    stack.fail_next_load()
    with pytest.raises(RequestFailedError):
        stack.warm([prompt])
    [warm] = stack.warm([prompt])
    assert warm.token_ids == cold.token_ids


@BOTH
def test_a_client_that_hangs_up_while_its_prompt_loads(stack: Stack) -> None:
    """Meanwhile others are served, and its blocks stay its own until the load ends."""
    prompt = stack.prompt(2 * stack.config.chunk_size + 5, "hangs up loading")
    # Less than a chunk: nothing of it is stored or loaded.
    other = stack.prompt(100, "served meanwhile")
    [cold] = stack.cold([prompt])
    [alone] = stack.cold([other])
    stack.forget_local()
    held = stack.cache.memory()["total_object_count"]
    loads = len(stack.transfers())
    with stack.hold_next_load():
        connection = send(stack, prompt)
        stack.wait_held()
        [meanwhile] = stack.engine.complete([other], 12)
        assert meanwhile.token_ids == alone.token_ids
        connection.close()
        [again] = stack.engine.complete([other], 12)
        assert again.token_ids == alone.token_ids
        assert len(stack.transfers()) == loads, "reported before it had ended"
    stack.cache.wait_stored(held)
    [warm] = stack.warm([prompt])
    assert warm.token_ids == cold.token_ids
    assert_same_blocks(stack.stored_blocks(prompt), stack.restored_blocks(prompt))


@SUB_BLOCKS
def test_a_client_that_hangs_up_leaves_nothing_locked(stack: Stack) -> None:
    """Its request waits for blocks of the NPU, looked up and never loaded."""
    prompt = stack.prompt(3 * BLOCK_SIZE + 5, "hangs up")
    stack.cold([prompt])
    for attempt in range(5):
        # They take 11 of 13 blocks, and keep them while they answer.
        others = [stack.prompt(n, ("others", n, attempt)) for n in (700, 600)]
        stack.forget_local()
        held = stack.cache.memory()["total_object_count"]
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(stack.engine.complete, others, 38)
            locked = waits_with_locks(stack, prompt, until=answers.done)
            answers.result()
        stack.cache.wait_stored(held + 5 + 4)
        if locked:
            return
        # On a busy machine the others may have ended before it was looked up.
    pytest.fail("the request never waited with chunks locked")


def waits_with_locks(
    stack: Stack, prompt: list[int], until: Callable[[], bool]
) -> bool:
    """Send a prompt when few blocks are free, and hang up when its chunks are locked.

    Args:
        stack: The servers.
        prompt: What LMCache has.
        until: Whether there is no use in waiting any longer.

    Returns:
        Whether chunks were locked while blocks were short.
    """
    while stack.engine.counters().total(USED) < 0.8:
        if until():
            return False
        time.sleep(0.02)
    connection = send(stack, prompt)
    try:
        while not until():
            if stack.cache.memory()["read_locked_count"]:
                return not until()
            time.sleep(0.02)
        return False
    finally:
        connection.close()


def send(stack: Stack, prompt: list[int]) -> HTTPConnection:
    """Send a prompt, and wait for nothing."""
    connection = HTTPConnection("127.0.0.1", stack.engine.port, timeout=300)
    body = {"model": stack.engine.served_name, "prompt": prompt, "max_tokens": 5}
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps(body),
        {"Content-Type": "application/json"},
    )
    return connection
