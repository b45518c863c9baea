# SPDX-License-Identifier: Apache-2.0
"""What the kernel knows about processes: sessions and shared memory."""

# Standard
from pathlib import Path


def session_members(session_id: int) -> list[int]:
    """List the live processes of a session, zombies left out.

    Args:
        session_id: Process id of the session's leader.

    Returns:
        Process ids, the leader's too while it lives.
    """
    members = []
    for pid in process_ids():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # ended while we looked
            continue
        # The command, in parentheses, may hold spaces: split behind it.
        state, _parent, _group, session = stat.rpartition(")")[2].split()[:4]
        if int(session) == session_id and state not in "ZX":
            members.append(pid)
    return members


def mapped_segments(pid: int) -> set[Path]:
    """List the POSIX shared memory and semaphores that a process has mapped.

    Args:
        pid: Its process id.

    Returns:
        Files that still exist; none for a process that ended or is not ours.
    """
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    names = (line.partition("/dev/shm/")[2] for line in maps.splitlines())
    return {
        Path("/dev/shm") / name
        for name in names
        if name and not name.endswith(" (deleted)")
    }


def process_ids() -> list[int]:
    """List the ids of all processes."""
    return [
        int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()
    ]
