# SPDX-License-Identifier: Apache-2.0
"""Sessions and shared memory as the kernel lists them."""

# Standard
from multiprocessing import shared_memory
from pathlib import Path
import os
import subprocess
import sys

# First Party
from tests.support.serving.procfs import mapped_segments, process_ids, session_members

NO_PROCESS = 2**22 + 1  # above the highest process id of Linux


def test_session_members_ignores_other_sessions() -> None:
    assert os.getpid() in session_members(os.getsid(0))
    assert session_members(NO_PROCESS) == []


def test_zombies_are_no_members() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""], start_new_session=True)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert child.pid in process_ids(), "ended, but not waited for"
    assert session_members(child.pid) == []
    child.wait()


def test_mapped_segments_are_those_that_exist() -> None:
    assert mapped_segments(NO_PROCESS) == set()
    segment = shared_memory.SharedMemory(create=True, size=4096)
    file = Path("/dev/shm") / segment.name
    try:
        assert file in mapped_segments(os.getpid())
    finally:
        segment.unlink()
    assert file not in mapped_segments(os.getpid())
    segment.close()
