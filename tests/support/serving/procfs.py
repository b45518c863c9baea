# SPDX-License-Identifier: Apache-2.0
"""What the kernel knows about processes: sessions and shared memory."""

# Standard
from pathlib import Path
import os

# Third Party
import psutil


def session_members(session_id: int) -> list[int]:
    """List the live processes of a session, zombies left out.

    Args:
        session_id: Process id of the session's leader.

    Returns:
        Process ids, the leader's too while it lives.
    """
    members = []
    for pid in psutil.pids():
        try:
            own = os.getsid(pid) == session_id
            if own and psutil.Process(pid).status() not in ("zombie", "dead"):
                members.append(pid)
        except (ProcessLookupError, psutil.NoSuchProcess):  # ended while we looked
            continue
    return members


def mapped_segments(pid: int) -> set[Path]:
    """List the POSIX shared memory and semaphores that a process has mapped.

    Args:
        pid: Its process id.

    Returns:
        Files that still exist; none for a process that ended or is not ours.
    """
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()  # psutil's smaps take long
    except OSError:
        return set()
    names = (line.partition("/dev/shm/")[2] for line in maps.splitlines())
    return {
        Path("/dev/shm") / name
        for name in names
        if name and not name.endswith(" (deleted)")
    }
