# SPDX-License-Identifier: Apache-2.0
"""Servers that work, die, hang and leave children behind."""

# Standard
from collections.abc import Iterator
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


@pytest.fixture
def servers(tmp_path: Path) -> Iterator["Servers"]:
    """Makes servers out of Python code, and ends them whatever happens."""
    made = Servers(tmp_path)
    yield made
    for server in made.all:
        for pid in session_members(server.pid):
            os.kill(pid, signal.SIGKILL)


class Servers:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.all: list[ServerProcess] = []

    def start(self, code: str, *arguments: str) -> ServerProcess:
        server = ServerProcess(
            "test server",
            [sys.executable, "-c", code, *arguments],
            dict(os.environ, TORCH_DEVICE_BACKEND_AUTOLOAD="0"),
            self._folder / "logs" / "server.log",
            self._folder / "run",
        )
        server.start()
        self.all.append(server)
        return server


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For servers of which something ignores SIGTERM, however long it is waited."""
    monkeypatch.setattr(processes, "HELPERS_S", 0.2)


def is_ready(server: ServerProcess) -> bool:
    return "ready" in server.log()


def test_ready_server_stops_politely(servers: Servers) -> None:
    server = servers.start(SERVE)
    waits: list[float] = []
    server.wait_ready(lambda: is_ready(server), 120.0, waits.append)
    assert server.is_running()
    assert session_members(server.pid) == [server.pid]

    assert server.stop()

    assert not server.is_running()
    assert session_members(server.pid) == []
    assert waits == sorted(waits)


def test_stop_twice_or_before_start_is_no_error(
    servers: Servers, tmp_path: Path
) -> None:
    server = servers.start(SERVE)
    assert server.stop()
    assert server.stop()
    never = ServerProcess("never", ["false"], {}, tmp_path / "log", tmp_path)
    assert never.stop()


def test_dead_server_gives_its_reason_and_the_end_of_its_log(servers: Servers) -> None:
    server = servers.start(
        "print('one line of log', flush=True); raise ValueError('no such model')"
    )
    with pytest.raises(ServerFailedError) as failure:
        server.wait_ready(lambda: False, 120.0)
    text = str(failure.value)
    assert text.startswith("test server ended with status 1.")
    assert "reason: ValueError: no such model" in text
    assert "| one line of log" in text
    assert str(server.log_path) in text


def test_server_that_is_never_ready_is_reported(servers: Servers) -> None:
    server = servers.start(SERVE)
    with pytest.raises(ServerFailedError, match="was not ready after 0 s"):
        server.wait_ready(lambda: False, 0.0)
    assert not server.ends_within(0.0)
    assert server.is_running(), "stopping it is the caller's business"


@pytest.mark.usefixtures("impatient")
def test_server_that_ignores_sigterm_is_killed(servers: Servers) -> None:
    server = servers.start(STUBBORN)
    server.wait_ready(lambda: is_ready(server), 120.0)
    assert not server.stop(term_timeout_s=0.2)
    assert session_members(server.pid) == []


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("parent_crashes", [False, True])
def test_children_end_with_their_server(servers: Servers, parent_crashes: bool) -> None:
    server = servers.start(ORPHANING)
    server.wait_ready(lambda: server.log().count("ready") == 2, 120.0)
    assert len(session_members(server.pid)) == 2
    if parent_crashes:
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait_ended(60.0) == -signal.SIGKILL

    assert not server.stop(), "the child ignores SIGTERM"

    assert session_members(server.pid) == []


SHARING = f"""
import sys
from multiprocessing import resource_tracker, shared_memory
segment = shared_memory.SharedMemory(sys.argv[1], create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")
{SERVE}
"""


@pytest.mark.parametrize("killed", [False, True])
def test_shared_memory_left_behind_is_removed(servers: Servers, killed: bool) -> None:
    name = f"rbln_demo_test_{os.getpid()}"
    file = Path("/dev/shm") / name
    server = servers.start(SHARING, name)
    server.wait_ready(lambda: is_ready(server), 120.0)
    assert mapped_segments(server.pid) == {file}

    if killed:
        server.kill()
    else:
        server.stop()

    assert server.leftovers == {file}
    assert not file.exists()


def test_shared_memory_of_another_process_is_kept(servers: Servers) -> None:
    segment = shared_memory.SharedMemory(create=True, size=4096)
    try:
        server = servers.start(
            "import sys\nfrom multiprocessing import resource_tracker as r\n"
            "from multiprocessing.shared_memory import SharedMemory\n"
            "segment = SharedMemory(sys.argv[1])\n"
            "r.unregister(segment._name, 'shared_memory')\n" + SERVE,
            segment.name,
        )
        server.wait_ready(lambda: is_ready(server), 120.0)
        assert mapped_segments(server.pid)
        server.stop()
        assert server.leftovers == set()
        assert (Path("/dev/shm") / segment.name).exists()
    finally:
        segment.close()
        segment.unlink()


def test_kill_ends_the_whole_session(servers: Servers) -> None:
    server = servers.start(ORPHANING)
    server.wait_ready(lambda: server.log().count("ready") == 2, 120.0)
    server.kill()
    assert session_members(server.pid) == []


def test_check_running_notices_a_death(servers: Servers) -> None:
    server = servers.start("import sys; sys.exit(7)")
    assert server.ends_within(60.0)
    with pytest.raises(ServerFailedError, match="ended with status 7"):
        server.check_running()


def test_program_that_does_not_exist(tmp_path: Path) -> None:
    server = ServerProcess(
        "missing", [str(tmp_path / "nothing")], {}, tmp_path / "log", tmp_path
    )
    with pytest.raises(ServerFailedError, match="missing could not be started"):
        server.start()
    with pytest.raises(ServerFailedError, match="was not started"):
        _ = server.pid


def test_log_of_an_earlier_run_is_not_taken_for_this_one(servers: Servers) -> None:
    first = servers.start("print('ready')")
    first.wait_ended(60.0)
    second = servers.start("import time; time.sleep(600)")
    assert not is_ready(second)
    assert second.log_path == first.log_path


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("", None),
        ("INFO all is well\n", None),
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
def test_likely_reason(log: str, reason: str | None) -> None:
    found = likely_reason(log)
    assert found is None if reason is None else found and found.startswith(reason)
