# SPDX-License-Identifier: Apache-2.0
"""The reason of a refused start is the last line of the log."""

# Future
from __future__ import annotations

# Standard
from pathlib import Path
import os
import subprocess
import sys

# Third Party
import pytest

# First Party
from lmcache.integration.vllm import refusal

#: As vLLM does it: a front process, an engine in a process of its own that is forked or
#: started anew, and a traceback that does not say why.
FRONT = """
import multiprocessing, sys
from lmcache.integration.vllm import refusal

@refusal.leaves_reason
def start(refuses):
    if refuses:
        raise ValueError("chunk size\\nis 200")

def engine(refuses):
    refusal.announce_in_front_process()
    try:
        start(refuses)
    except ValueError:
        refusal.leave(ValueError("a later one"))

if __name__ == "__main__":
    refusal.announce_in_front_process()
    context = multiprocessing.get_context(sys.argv[1])
    process = context.Process(target=engine, args=(sys.argv[2] == "refuses",))
    process.start()
    process.join()
    raise RuntimeError("Engine core initialization failed")
"""


def run(tmp_path: Path, method: str, does: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "front.py"
    program.write_text(FRONT)
    # As if started by a program that has imported the connector too.
    inherited = {refusal.VARIABLE: str(tmp_path / "lmcache-rbln-refusal-1")}
    return subprocess.run(
        [sys.executable, str(program), method, does],
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
    assert not list(tmp_path.glob("lmcache-rbln-refusal-*"))


def test_nothing_is_said_of_other_failures(tmp_path: Path) -> None:
    done = run(tmp_path, "fork", "starts")
    assert done.returncode == 1
    assert "refused to start" not in done.stdout


def test_a_refusal_in_the_front_process_is_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "reason"
    monkeypatch.setenv(refusal.VARIABLE, str(path))
    monkeypatch.setattr(refusal, "_front", os.getpid())
    refusal.leave(ValueError("seen by the caller"))
    assert not path.exists()


def test_a_file_of_somebody_else_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "reason"
    (tmp_path / "theirs").write_text("theirs")
    path.symlink_to(tmp_path / "theirs")
    monkeypatch.setenv(refusal.VARIABLE, str(path))
    monkeypatch.setattr(refusal, "_front", None)
    refusal.leave(ValueError("mine"))
    assert path.read_text() == "theirs"


def test_the_folder_is_private_and_new_for_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pid is used again, in a container after each restart."""
    monkeypatch.setattr(refusal.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(refusal.atexit, "register", lambda *_: None)
    monkeypatch.setenv(refusal.VARIABLE, "")
    folders = []
    for _ in range(2):
        monkeypatch.setattr(refusal, "_front", None)
        refusal.announce_in_front_process()
        folders.append(Path(os.environ[refusal.VARIABLE]).parent)
    assert folders[0] != folders[1]
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)


def test_a_reason_that_is_no_text_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal.logging, "disable", lambda: None)
    (tmp_path / "reason").write_bytes(b"caf\xe9")
    refusal._announce(tmp_path, os.getpid())
    assert not tmp_path.exists()
