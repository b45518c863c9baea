# SPDX-License-Identifier: Apache-2.0
"""Engines that must not start, and say why."""

# Standard
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
import os

# Third Party
from npu_holder import npu_holder
import pytest

# First Party
from tests.e2e.messages import assert_logged, assert_logged_last
from tests.e2e.serving import SLIDING_WINDOWS
from tests.e2e.stack import BLOCK_SIZE, Stack, StackConfig
from tests.e2e.stack_pool import StackPool
from tests.support.serving.processes import ServerFailedError
from tests.support.serving.runtime import Runtime, find_runtime, own_machine


@contextmanager
def npu_held(folder: Path) -> Iterator[int]:
    """Hold the only NPU in another process; yields its process id."""
    env = {**find_runtime().env, **own_machine(folder)}
    with npu_holder(env) as holder:
        yield holder.pid


@pytest.fixture
def folder(stacks: StackPool, tmp_path: Path) -> Path:
    """A folder for a stack of the test's own; no other stack runs meanwhile."""
    stacks.stop()
    return tmp_path


def own_stack(config: StackConfig, runtime: Runtime, folder: Path) -> Stack:
    return Stack(config, runtime, folder, f"rbln_e2e_{os.getpid()}_{config.name}")


def refused(config: StackConfig, runtime: Runtime, folder: Path) -> Stack:
    """Start a stack whose engine refuses, under the name of its start."""
    stack = own_stack(config, runtime, folder)
    try:
        with pytest.raises(ServerFailedError, match="ended with status 1"):
            stack.start()
    finally:
        stack.stop()
    assert_logged_last(config.name, stack.engine.process.log())
    return stack


def test_lmcache_driven_fails_at_validation(runtime: Runtime, folder: Path) -> None:
    driven = {"LMCACHE_MP_TRANSFER_MODE": "lmcache_driven"}
    config = StackConfig("lmcache-driven", transfer_mode="auto", env=driven)
    refused(config, runtime, folder)


def test_a_server_that_serves_other_workers_alone(
    runtime: Runtime, folder: Path
) -> None:
    """Its default mode, in which it drops a registration without a word."""
    config = StackConfig("unserved", transfer_mode="lmcache_driven")
    stack = refused(config, runtime, folder)
    assert "No handler registered" in stack.cache.process.log()


@dataclass(frozen=True)
class Misfit(StackConfig):
    """A chunk that no number of blocks fills."""

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk."""
        return BLOCK_SIZE + 72


def test_a_chunk_that_is_no_multiple_of_a_block(runtime: Runtime, folder: Path) -> None:
    refused(Misfit("misfit"), runtime, folder)


def test_a_model_of_sliding_windows(runtime: Runtime, folder: Path) -> None:
    config = StackConfig("windows", model="llama", engine_args=SLIDING_WINDOWS)
    refused(config, runtime, folder)


@pytest.mark.sim
@pytest.mark.parametrize("backend", ["rbln", None], ids=["pinned", "unpinned"])
def test_held_npu_fails_at_first_use_and_names_the_holder(
    runtime: Runtime, folder: Path, backend: str | None
) -> None:
    stack = own_stack(StackConfig("held", backend=backend), runtime, folder)
    try:
        with npu_held(stack.folder) as holder:
            with pytest.raises(ServerFailedError) as failure:
                stack.start()
            # The server started beside the holder, and stops beside it.
            assert stack.cache.process.is_running()
            stack.cache.stop()
    finally:
        stack.stop()
    assert f"NPU 0 is held by pid {holder}" in str(failure.value)
    assert_logged("held", stack.engine.process.log())
    assert {entry["pid"] for entry in stack.opens()} == {holder}
