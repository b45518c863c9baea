# SPDX-License-Identifier: Apache-2.0
"""Which process opens which NPU, from the simulator's log of opens."""

# Standard
from pathlib import Path
import signal

# Third Party
import pytest

# First Party
from tests.e2e.stack import Stack
from tests.support.serving.procfs import session_members

pytestmark = pytest.mark.sim


def title(pid: int) -> str:
    """Title of a process; vLLM names its processes after their job."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:  # ended while we looked
        return ""


@pytest.mark.parametrize("stack", ["kv-first"], indirect=True)
def test_only_the_worker_opens_its_visible_npu(stack: Stack) -> None:
    opens = stack.opens()

    assert [entry["npu"] for entry in opens] == [1], "of two NPUs, 1 is visible"
    [entry] = opens
    worker = int(str(entry["pid"]))
    members = session_members(stack.engine.process.pid)
    assert worker in members
    assert "Worker" in title(worker)
    # The API server and the scheduler live beside it.
    assert worker != stack.engine.process.pid
    assert any("EngineCore" in title(pid) for pid in members if pid != worker)


@pytest.mark.parametrize("stack", ["blocks-first", "kv-first", "mla"], indirect=True)
def test_server_never_opens_an_npu(stack: Stack) -> None:
    """Also after stores, loads and a restart, with the backend pinned or not."""
    prompt = stack.prompt(stack.config.chunk_size + 1, "opens")
    stack.cold([prompt])
    stack.warm([prompt])
    servers = stack.cache_pids
    assert servers

    pids = {int(str(entry["pid"])) for entry in stack.opens()}

    assert len(pids) == 1
    assert pids.isdisjoint(servers)
    assert pids <= set(session_members(stack.engine.process.pid))


@pytest.mark.parametrize("stack", ["blocks-first", "kv-first"], indirect=True)
def test_server_restarts_while_the_worker_holds_the_npu(stack: Stack) -> None:
    """Once with the backend pinned; stopping must not need an NPU either."""
    stack.cold([stack.prompt(stack.config.chunk_size + 1, "before the restart")])
    old = stack.cache
    opened = stack.opens()

    # Raises if the server has to be killed or leaves shared memory behind.
    stack.restart_cache(f"rbln_e2e_devices_{old.port}")

    # uvicorn shuts down in order, then ends with the signal that it was sent.
    assert old.process.wait_ended(0.0) in (0, -signal.SIGTERM)
    log = old.process.log()
    assert "MPCacheServer closed" in log
    # Nothing was asked of the NPU, which would have been refused.
    assert "held by" not in log
    assert "rbln-sim" not in log
    assert stack.opens() == opened
    prompt = stack.prompt(stack.config.chunk_size + 1, "after the restart")
    [cold] = stack.cold([prompt])
    [warm] = stack.warm([prompt])
    assert warm.token_ids == cold.token_ids
    assert warm.cached_tokens == stack.config.chunk_size
