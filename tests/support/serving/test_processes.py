# SPDX-License-Identifier: Apache-2.0
"""Whatever a server leaves behind is found, ended and removed; its log says why."""

# Standard
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path
import os
import signal
import sys

# Third Party
import pytest

# First Party
from tests.support.serving import processes
from tests.support.serving.processes import (
    ServerFailedError,
    ServerProcess,
    likely_reason,
)
from tests.support.serving.procfs import mapped_segments, session_members

SERVE = "import time; print('ready', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SERVE
# The child outlives its parent, as an engine does whose API server crashed.
ORPHANING = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {STUBBORN!r}])
{SERVE}
"""
SHARING = f"""
import sys
from multiprocessing import resource_tracker, shared_memory
create = sys.argv[2] == "create"
segment = shared_memory.SharedMemory(sys.argv[1], create=create, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")
{SERVE}
"""
Start = Callable[..., ServerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers made of Python code, and ends them whatever happens."""
    started = []

    def starting(code: str, *arguments: str, ready: int = 0) -> ServerProcess:
        server = ServerProcess(
            "test server",
            [sys.executable, "-c", code, *arguments],
            dict(os.environ, TORCH_DEVICE_BACKEND_AUTOLOAD="0"),
            tmp_path / "logs" / "server.log",
            tmp_path / "run",
        )
        server.start()
        started.append(server)
        if ready:
            server.wait_ready(lambda: server.log().count("ready") == ready, 120.0)
        return server

    yield starting
    for server in started:
        for pid in session_members(server.pid):
            os.kill(pid, signal.SIGKILL)


def test_a_server_stops_politely_and_twice_is_no_error(start: Start) -> None:
    server = start(SERVE, ready=1)
    assert session_members(server.pid) == [server.pid]
    assert server.stop()
    assert session_members(server.pid) == []
    assert server.stop()


def test_a_dead_server_gives_its_reason_and_the_end_of_its_log(start: Start) -> None:
    server = start("print('one line', flush=True); raise ValueError('no such model')")
    with pytest.raises(ServerFailedError) as failure:
        server.wait_ready(lambda: False, 120.0)
    text = str(failure.value)
    assert text.startswith("test server ended with status 1.")
    assert "reason: ValueError: no such model" in text
    assert "| one line" in text
    assert str(server.log_path) in text


def test_a_server_that_is_never_ready_is_reported(start: Start) -> None:
    with pytest.raises(ServerFailedError, match="was not ready after 0 s"):
        start(SERVE).wait_ready(lambda: False, 0.0)


@pytest.mark.parametrize("parent_crashes", [False, True])
def test_children_end_with_their_server(
    start: Start, parent_crashes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "HELPERS_S", 0.2)
    server = start(ORPHANING, ready=2)
    assert len(session_members(server.pid)) == 2
    if parent_crashes:
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait_ended(60.0) == -signal.SIGKILL
    assert not server.stop(), "the child ignores SIGTERM"
    assert session_members(server.pid) == []


@pytest.mark.parametrize("killed", [False, True])
def test_shared_memory_left_behind_is_removed(start: Start, killed: bool) -> None:
    name = f"rbln_demo_test_{os.getpid()}"
    file = Path("/dev/shm") / name
    server = start(SHARING, name, "create", ready=1)
    assert mapped_segments(server.pid) == {file}
    if killed:
        server.kill()
    else:
        server.stop()
    assert server.leftovers == {file}
    assert not file.exists()


def test_shared_memory_of_another_process_is_kept(start: Start) -> None:
    segment = shared_memory.SharedMemory(create=True, size=4096)
    try:
        server = start(SHARING, segment.name, "open", ready=1)
        assert mapped_segments(server.pid)
        server.stop()
        assert server.leftovers == set()
        assert (Path("/dev/shm") / segment.name).exists()
    finally:
        segment.close()
        segment.unlink()


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("INFO all is well\n", ""),
        ("ValueError: first\nOSError: second\nINFO end\n", "OSError: second"),
        (
            "(EngineCore pid=9) ERROR ValueError: no layout\n"
            "RuntimeError: Engine core initialization failed. See root cause above.\n",
            "ValueError: no layout",
        ),
        ("lmcache: error: unrecognized arguments: --x\n", "error: unrecognized"),
        (
            "[rbln-sim] rbln_malloc: NPU 0 is held by pid 7 (python)\n"
            "RuntimeError: rbln_malloc failed\n",
            "RuntimeError: rbln_malloc failed\n"
            "        [rbln-sim] rbln_malloc: NPU 0 is held by pid 7 (python)",
        ),
    ],
)
def test_likely_reason(log: str, reason: str) -> None:
    assert (likely_reason(log) or "").startswith(reason)
    assert bool(reason) == bool(likely_reason(log))
