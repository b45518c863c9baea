# SPDX-License-Identifier: Apache-2.0
"""What the front process does last: the reason of a refusal, sockets of the killed."""

# Future
from __future__ import annotations

# Standard
from pathlib import Path
import os
import socket
import subprocess
import sys

# Third Party
import pytest

# First Party
from lmcache.integration.vllm import front_process

#: As vLLM does it: a front process, an engine in a process of its own that is forked or
#: started anew, and a traceback that does not say why, or an engine that is killed.
FRONT = """
import multiprocessing, os, signal, socket, sys
from lmcache.integration.vllm import front_process

NAMES = ("bound", "file", "theirs", "no")

@front_process.leaves_reason
def start():
    raise ValueError("chunk size\\nis 200")

def engine(does):
    front_process.announce()
    if does == "refuses":
        try:
            start()
        except ValueError:
            front_process.leave_reason(ValueError("a later one"))
    if does == "serves":
        front_process.forget_reason()
    if does == "killed":
        names = [os.environ["TMPDIR"] + "/" + name for name in NAMES]
        front_process.leave_sockets(names)
        socket.socket(socket.AF_UNIX).bind(names[0])
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    front_process.announce()
    context = multiprocessing.get_context(sys.argv[1])
    for does in sys.argv[2:]:
        process = context.Process(target=engine, args=(does,))
        process.start()
        process.join()
    raise RuntimeError("Engine core initialization failed")
"""


def run(tmp_path: Path, method: str, *does: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "front.py"
    program.write_text(FRONT)
    # As if started by a program that has imported the connector too.
    inherited = {front_process.VARIABLE: str(tmp_path / "lmcache-rbln-front-1")}
    return subprocess.run(
        [sys.executable, str(program), method, *does],
        env={**os.environ, **inherited, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_front_process_says_it_last(tmp_path: Path, method: str) -> None:
    done = run(tmp_path, method, "refuses")
    assert done.returncode == 1
    last = done.stdout.strip().splitlines()[-1]
    assert "LMCache refused to start: chunk size is 200" in last
    assert "a later one" not in done.stdout
    assert not list(tmp_path.glob("lmcache-rbln-front-*"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_sockets_of_a_killed_engine_are_removed(tmp_path: Path, method: str) -> None:
    (tmp_path / "file").touch()
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(tmp_path / "theirs"))
    done = run(tmp_path, method, "killed")
    assert done.stdout.strip().splitlines()[-1].startswith("RuntimeError")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"front.py", "file", "theirs"}


def test_a_front_process_that_has_ended_is_missed_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(front_process.VARIABLE, str(tmp_path / "gone"))
    front_process.leave_sockets(["/tmp/socket"])
    front_process.leave_reason(ValueError("too late"))
    assert not list(tmp_path.iterdir())


def test_a_folder_of_somebody_else_gets_no_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").touch()
    (tmp_path / "sockets").symlink_to(tmp_path / "theirs")
    monkeypatch.setenv(front_process.VARIABLE, str(tmp_path))
    front_process.leave_sockets(["/tmp/socket"])
    assert not (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_nothing_is_said_of_an_engine_before_the_one_that_served(
    tmp_path: Path, method: str
) -> None:
    done = run(tmp_path, method, "refuses", "serves")
    assert "refused to start" not in done.stdout
    done = run(tmp_path, method, "serves", "refuses")
    assert "refused to start" in done.stdout


def test_a_reason_of_the_same_start_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM starts data-parallel engines together: one serves, another refuses."""
    monkeypatch.setenv(front_process.VARIABLE, str(tmp_path))
    monkeypatch.setattr(front_process, "_front", None)
    front_process.forget_reason()
    front_process.leave_reason(ValueError("data parallelism"))
    front_process.forget_reason()
    assert (tmp_path / "reason").read_text() == "data parallelism"


def test_nothing_is_said_of_other_failures(tmp_path: Path) -> None:
    done = run(tmp_path, "fork", "starts")
    assert done.returncode == 1
    assert "refused to start" not in done.stdout


def test_a_refusal_in_the_front_process_is_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "reason"
    monkeypatch.setenv(front_process.VARIABLE, str(tmp_path))
    monkeypatch.setattr(front_process, "_front", os.getpid())
    front_process.leave_reason(ValueError("seen by the caller"))
    assert not path.exists()


def test_a_file_of_somebody_else_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "reason"
    (tmp_path / "theirs").write_text("theirs")
    path.symlink_to(tmp_path / "theirs")
    monkeypatch.setenv(front_process.VARIABLE, str(tmp_path))
    monkeypatch.setattr(front_process, "_front", None)
    front_process.leave_reason(ValueError("mine"))
    assert path.read_text() == "theirs"


def test_the_folder_is_private_and_new_for_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pid is used again, in a container after each restart."""
    monkeypatch.setattr(front_process.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(front_process.atexit, "register", lambda *_: None)
    monkeypatch.setenv(front_process.VARIABLE, "")
    folders = []
    for _ in range(2):
        monkeypatch.setattr(front_process, "_front", None)
        front_process.announce()
        folders.append(Path(os.environ[front_process.VARIABLE]))
    assert folders[0] != folders[1]
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)


def test_a_reason_that_is_no_text_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_process.logging, "disable", lambda: None)
    (tmp_path / "reason").write_bytes(b"caf\xe9")
    front_process._end(tmp_path, os.getpid())
    assert not tmp_path.exists()
