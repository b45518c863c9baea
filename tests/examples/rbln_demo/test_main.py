# SPDX-License-Identifier: Apache-2.0
"""The demo's exit status, and that it takes its servers with it."""

# Standard
from pathlib import Path
import signal
import subprocess
import sys
import time

# Third Party
import psutil
import pytest

# First Party
from examples.rbln_demo import __main__ as demo
from tests.examples.rbln_demo.test_report import GOOD

ROOT = Path(demo.__file__).resolve().parents[2]


def test_bad_measurement_fails_and_still_shows_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    bad = demo.Measurement(**{**vars(GOOD), "restored_tokens": 0})
    monkeypatch.setattr(demo, "run", lambda *_args: bad)
    assert demo.main([]) == 1
    shown = capsys.readouterr()
    assert "tokens restored     0 of 768" in shown.out
    assert "tokens restored in the warm round: wanted 768, got 0" in shown.err


@pytest.mark.npu
@pytest.mark.slow
def test_ended_by_a_signal_it_stops_its_servers(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "examples.rbln_demo", "--folder", str(tmp_path)],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )
    try:
        deadline = time.monotonic() + 240
        while (
            "vllm serve" not in output.read_text()
            or len(processes_that_name(tmp_path)) < 3
        ):
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.2)
        time.sleep(2.0)  # vllm serve is somewhere in its start-up
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()

    assert "stopping both servers" in output.read_text()
    assert processes_that_name(tmp_path) == []
    assert not Path(f"/dev/shm/lmcache_l1_pool_rbln_demo_{process.pid}").exists()


def processes_that_name(folder: Path) -> list[int]:
    """Processes with ``folder`` in their command line, or working below it."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        command, place = process.info["cmdline"] or [], process.info["cwd"] or ""
        if any(str(folder) in word for word in [*command, place]):
            found.append(process.pid)
    return found
