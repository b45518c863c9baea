# SPDX-License-Identifier: Apache-2.0
"""Twenty seeds of the campaign of the multiprocess path, and faults that it finds.

They take about thirty seconds of CPU, of which imports are five.
"""

# Standard
import os
import subprocess
import sys

# Third Party
import pytest

pytestmark = [pytest.mark.sim, pytest.mark.slow]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The runtime that pytest has chosen for itself is not the campaign's.
    kept = ("PATH", "HOME", "LD_LIBRARY_PATH", "XDG_RUNTIME_DIR", "TMPDIR")
    return subprocess.run(
        [sys.executable, "-m", "tests.campaigns.multiprocess", *arguments],
        env={name: os.environ[name] for name in kept if name in os.environ},
        capture_output=True,
        text=True,
    )


def test_twenty_seeds() -> None:
    done = run("--seeds", "1..20", "--steps", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'seeds': 20" in done.stdout


def test_a_planted_fault_is_found() -> None:
    done = run("--seeds", "1..20", "--plant", "two-blocks-swapped")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "replay: make campaign SEEDS=" in done.stdout
