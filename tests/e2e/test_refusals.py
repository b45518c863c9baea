# SPDX-License-Identifier: Apache-2.0
"""Engines that must not start, and say why."""

# Standard
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
import os
import subprocess
import sys

# Third Party
import pytest

# First Party
from tests.e2e.messages import assert_logged
from tests.e2e.stack import BLOCK_SIZE, Stack, StackConfig
from tests.e2e.stack_pool import StackPool
from tests.support.serving.processes import ServerFailedError
from tests.support.serving.runtime import Runtime, find_runtime, own_machine

HOLD_AN_NPU = """
import sys, torch
torch.rbln.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def npu_held(folder: Path) -> Iterator[int]:
    """Hold the only NPU in another process; yields its process id."""
    env = {**find_runtime().env, **own_machine(folder)}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_AN_NPU],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "held"
        yield holder.pid
    finally:
        holder.communicate("")


@pytest.fixture
def folder(stacks: StackPool, tmp_path: Path) -> Path:
    """A folder for a stack of the test's own; no other stack runs meanwhile."""
    stacks.stop()
    return tmp_path


def own_stack(config: StackConfig, runtime: Runtime, folder: Path) -> Stack:
    return Stack(config, runtime, folder, f"rbln_e2e_{os.getpid()}_{config.name}")


def test_lmcache_driven_fails_at_validation(runtime: Runtime, folder: Path) -> None:
    config = StackConfig(
        "lmcache-driven",
        transfer_mode="auto",
        env={"LMCACHE_MP_TRANSFER_MODE": "lmcache_driven"},
    )
    stack = own_stack(config, runtime, folder)
    try:
        with pytest.raises(ServerFailedError) as failure:
            stack.start()
    finally:
        stack.stop()
    reason = str(failure.value)
    assert "engine_driven" in reason
    assert_logged("lmcache-driven", stack.engine.process.log())


def test_a_server_that_serves_other_workers_alone(
    runtime: Runtime, folder: Path
) -> None:
    """Its default mode; the worker does not wait for an answer that never comes."""
    config = StackConfig("unserved", transfer_mode="lmcache_driven")
    stack = own_stack(config, runtime, folder)
    try:
        with pytest.raises(ServerFailedError):
            stack.start()
        assert_logged("unserved", stack.engine.process.log())
        assert "No handler registered" in stack.cache.process.log()
    finally:
        stack.stop()


@dataclass(frozen=True)
class Misfit(StackConfig):
    """A chunk that no number of blocks fills."""

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk."""
        return BLOCK_SIZE + 72


def test_a_chunk_that_is_no_multiple_of_a_block(runtime: Runtime, folder: Path) -> None:
    stack = own_stack(Misfit("misfit"), runtime, folder)
    try:
        with pytest.raises(ServerFailedError):
            stack.start()
        assert_logged("misfit", stack.engine.process.log())
    finally:
        stack.stop()


def test_a_server_in_the_wrong_mode_is_named(runtime: Runtime, folder: Path) -> None:
    """It drops the registration without a word, which took 300 s to be noticed."""
    config = StackConfig("wrong-mode", transfer_mode="lmcache_driven")
    stack = own_stack(config, runtime, folder)
    try:
        with pytest.raises(ServerFailedError, match="ended with status 1"):
            stack.start()
        assert "No handler registered" in stack.cache.process.log()
    finally:
        stack.stop()
    log = stack.engine.process.log()
    said = [line for line in log.splitlines() if line.startswith("(EngineCore")]
    wanted = (
        "The LMCache server answers, but not to the registration of an engine-driven "
        "worker. Start the server with `--supported-transfer-mode engine_driven`"
    )
    assert wanted in said[-1], log


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
    assert {entry["pid"] for entry in stack.opens()} == {holder}
