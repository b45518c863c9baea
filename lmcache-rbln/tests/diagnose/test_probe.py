# SPDX-License-Identifier: Apache-2.0
"""Probes that end in every way a program can."""

# Standard
from pathlib import Path
import os
import signal
import textwrap
import time

# Third Party
import pytest

# First Party
from lmcache_rbln.diagnose.probe import Facts, run_probe

FIRST = """
import json, os, signal, subprocess, sys, time
from lmcache_rbln.diagnose.probe import tell
tell("first", lambda: {"value": 1})
"""


def run(folder: Path, code: str, timeout_s: float = 300) -> Facts:
    (folder / "probe_under_test.py").write_text(FIRST + textwrap.dedent(code))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    return run_probe(["probe_under_test"], {"asked": "é"}, environment, timeout_s)


def test_facts_among_the_noise_of_libraries(tmp_path: Path) -> None:
    facts = run(
        tmp_path,
        """
        print("INFO no newline at the end", end="")
        tell("second", lambda: json.load(sys.stdin) | {"text": "line\\nbreak"})
        for odd in ("{broken", "[1]", "5", '{"no": "topic"}', "[" * 5000):
            print("@lmcache-rbln-fact " + odd)
        print("x" * (1 << 22))
        tell("broken", int, "x")
        """,
    )
    assert facts.problem == ""
    assert facts.get("first") == {"value": 1}
    assert facts.get("second") == {"asked": "é", "text": "line\nbreak"}
    assert facts.get("broken")["error"].startswith("ValueError: invalid literal")
    assert facts.get("third") == {"error": "the probe did not get that far"}


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("raise ValueError('this is why')", "exit code 1: ValueError: this is why"),
        ("sys.exit(3)", "exit code 3: "),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "signal 11 (SIGSEGV)"),
    ],
)
def test_a_probe_that_crashes_keeps_what_it_told(
    tmp_path: Path, code: str, problem: str
) -> None:
    facts = run(tmp_path, code)
    assert problem in facts.problem
    assert facts.get("first") == {"value": 1}
    assert problem in facts.get("second")["error"]


def test_a_probe_that_hangs_ends_with_its_children(tmp_path: Path) -> None:
    hangs = """
        child = subprocess.Popen(["sleep", "600"])
        tell("child", lambda: {"pid": child.pid})
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
        """
    for timeout_s in (3, 60):
        facts = run(tmp_path, hangs, timeout_s)
        assert facts.problem == f"no answer in {timeout_s} s"
        if "child" in facts.topics:
            break  # else it was killed too early on a busy machine
    assert facts.get("first") == {"value": 1}
    pid = facts.get("child")["pid"]
    for _ in range(2000):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or ") Z " in status.read_text():
            break
        time.sleep(0.05)
    else:
        os.kill(pid, signal.SIGKILL)
        pytest.fail("the probe's child still runs")


def test_an_interpreter_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    assert "can't start /no/such/python" in run_probe(["x"], {}, {}, 5).problem
