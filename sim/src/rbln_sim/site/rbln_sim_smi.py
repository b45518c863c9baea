# SPDX-License-Identifier: Apache-2.0
"""Simulated ``rbln-smi -j``: the NPUs and the processes that use them.

Keys and types are those that public programs read from the driver's monitor; what no
simulated NPU has (temperature, PCI address, memory in use, …) is left out. Nothing is
opened and no lock is tried: the kernel's list of locks tells who owns an NPU.
"""

import json
import os
import sys
from pathlib import Path

_NPU_NAME = "RBLN-CR03"
_LOCKS = Path("/proc/locks")


def state_folder() -> Path:
    """Return the folder with the lock files, as librbln.so chooses it."""
    folder = os.environ.get("RBLN_SIM_STATE_DIR")
    if folder:
        return Path(folder)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return (
        Path(runtime, "rbln-sim") if runtime else Path(f"/tmp/rbln-sim-{os.getuid()}")
    )


def locked_inodes() -> set[int]:
    """Return the inode of each file that some process holds an flock on."""
    inodes = set()
    for line in _LOCKS.read_text().splitlines():
        # "1: FLOCK  ADVISORY  WRITE 4711 fe:00:5343451 0 EOF"; waiters have "->".
        words = line.split()
        if words[1] == "FLOCK":
            inodes.add(int(words[5].rpartition(":")[2]))
    return inodes


def owner_of(lock: Path, inodes: set[int]) -> tuple[int, str] | None:
    """Return process id and command line of an NPU's owner, or None if it is free."""
    try:
        if lock.stat().st_ino not in inodes:
            return None
        text = lock.read_text(errors="replace")
    except OSError:
        return None
    words = text.split(" ", 2)  # "pid 4711 (command line)"
    if len(words) < 3 or not words[1].isdigit():
        return None  # its owner has not written it yet
    return int(words[1]), words[2][1:-1]


def report() -> dict[str, object]:
    """Return what the monitor shows."""
    count = int(os.environ.get("RBLN_SIM_DEVICES") or "1")
    name = os.environ.get("RBLN_FORCE_NPU_NAME") or _NPU_NAME
    inodes = locked_inodes()
    devices, contexts = [], []
    for npu in range(count):
        devices.append({"npu": npu, "name": name, "device": f"rbln{npu}"})
        owner = owner_of(state_folder() / f"npu{npu}.lock", inodes)
        if owner is not None:
            pid, command = owner
            contexts.append(
                {"ctx_id": str(npu), "npu": npu, "process": command, "pid": str(pid)}
            )
    return {"KMD_version": "simulated", "devices": devices, "contexts": contexts}


def main() -> int:
    """Print the report.

    Returns:
        The exit code: 0, 1 if it can't be told, 2 for what is not simulated.
    """
    if sys.argv[1:] != ["-j"]:
        print("rbln-smi: only `rbln-smi -j` is simulated", file=sys.stderr)
        return 2
    try:
        print(json.dumps(report(), indent=2))
    except (OSError, ValueError) as error:
        print(f"rbln-smi: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
