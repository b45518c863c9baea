# SPDX-License-Identifier: Apache-2.0
"""How KV travels, proven from both logs, and what a new server changes."""

# Third Party
from lmcache_release import STRATEGIES
import pytest

# First Party
from tests.e2e.kv_blocks import assert_same_blocks
from tests.e2e.stack import Stack
from tests.support.serving.servers import SHM_PREFIX, transport_of

ALL = pytest.mark.parametrize(
    "stack", ["blocks-first", "kv-first", "mla"], indirect=True
)


@ALL
def test_shared_memory_is_used(stack: Stack) -> None:
    engine, server = stack.engine.process.log(), stack.cache.process.log()
    assert transport_of(engine) == "SHM"
    assert f"SHM pinned=False for shm_name={SHM_PREFIX}" in engine
    assert "mode=SHM" in engine
    assert STRATEGIES["SHM"] in server
    assert STRATEGIES["pickle"] not in server
    assert stack.cache.segment is not None and stack.cache.segment.exists()


@ALL
def test_transfer_is_engine_driven(stack: Stack) -> None:
    engine = stack.engine.process.log()
    assert "Creating transfer context (device_type=rbln, mode=engine_driven)" in engine
    # torch-rbln has streams and events, so transfers run beside the next forward.
    assert "Using RblnTransferContext for store path" in engine


@ALL
def test_both_sides_chose_the_rbln_backend(stack: Stack) -> None:
    """Pinned in two stacks, detected in the third."""
    assert "torch_device_type=rbln" in stack.engine.process.log()
    assert "torch_device_type=rbln" in stack.cache.process.log()


@pytest.mark.parametrize("stack", ["blocks-first"], indirect=True)
@pytest.mark.parametrize("transport", ["pickle", "SHM"])
def test_server_restarts_while_the_worker_serves(stack: Stack, transport: str) -> None:
    """The worker finds the new server, which may use another transport."""
    old = stack.prompt(2 * stack.config.chunk_size + 1, ("old", transport))
    [expected] = stack.cold([old])

    old_segment = stack.cache.segment
    name = f"rbln_e2e_restart_{stack.cache.port}" if transport == "SHM" else ""
    stack.restart_cache(name)

    assert transport_of(stack.engine.process.log()) == transport
    assert STRATEGIES[transport] in stack.cache.process.log()
    assert old_segment is None or not old_segment.exists()
    # The new server knows nothing: computed again, and then restored from it.
    [again] = stack.cold([old])
    before = stack.hits()
    [warm] = stack.warm([old])
    assert again.token_ids == warm.token_ids == expected.token_ids
    assert stack.hits() - before == 2 * stack.config.chunk_size
    assert_same_blocks(stack.stored_blocks(old), stack.restored_blocks(old))
