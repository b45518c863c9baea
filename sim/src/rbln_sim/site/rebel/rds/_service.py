# SPDX-License-Identifier: Apache-2.0
"""The storage service: one file as the NVMe device, and who holds which part of it.

The table of held parts lies beside the file, under a lock, so that all processes of a
simulated machine share the device and never a byte of it. What a process holds when it
ends, however it ends, is free again.
"""

import errno
import fcntl
import functools
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ._faults import schedule_of
from ._order import Order
from ._settings import UNIT, settings


@dataclass(frozen=True)
class Region:
    """A held part of the device.

    Attributes:
        number: Names it on this device.
        offset: Where it begins, in bytes.
        size: In bytes.
    """

    number: int
    offset: int
    size: int


def _birth(pid: int) -> str | None:
    """When a process started, or ``None`` if there is none: a pid is used again."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


class Service:
    """The storage of one simulated machine, as one process uses it."""

    def __init__(self) -> None:
        config = settings()
        self.capacity = config.capacity
        self.path = config.file
        self.order = Order(config.deferred) if config.deferred else None
        sleep = (lambda seconds: None) if config.deferred else time.sleep
        self.faults = schedule_of(config.faults, config.seed, sleep)
        self._me = (os.getpid(), _birth(os.getpid()))
        self._lock = threading.Lock()
        self._fd: int | None = None

    def fd(self) -> int:
        """Return the file descriptor of the device, opened with O_DIRECT.

        Raises:
            OSError: It cannot be opened, or its file system has no O_DIRECT.
        """
        with self._lock:
            if self._fd is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC
                try:
                    fd = os.open(self.path, flags, 0o600)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    raise OSError(
                        errno.EINVAL,
                        f"the file system of {self.path} has no O_DIRECT; name a file "
                        "on another one in RBLN_SIM_RDS_FILE",
                    ) from error
                if os.fstat(fd).st_size < self.capacity:
                    os.ftruncate(fd, self.capacity)
                self._fd = fd
            return self._fd

    def allocate(self, size: int) -> Region:
        """Take a free part.

        Args:
            size: In bytes, a multiple of 4096.

        Raises:
            OSError: ``ENOSPC`` if no free part is large enough, or as a fault says.
        """
        self.faults.begin("alloc")
        self.fd()
        with self._held() as held:
            offset, number = 0, 0
            for entry in sorted(held, key=lambda entry: entry[1]):
                if entry[1] - offset >= size:
                    break
                offset = entry[1] + entry[2]
            number = 1 + max((entry[0] for entry in held), default=0)
            if self.capacity - offset < size:
                raise OSError(
                    errno.ENOSPC,
                    f"rds: no {size} free bytes in one piece on a device of "
                    f"{self.capacity}",
                )
            held.append([number, offset, size, *self._me])
        return Region(number, offset, size)

    def release(self, region: Region) -> None:
        """Give a part back."""
        with self._held() as held:
            held[:] = [entry for entry in held if entry[0] != region.number]

    @contextmanager
    def _held(self) -> Iterator[list[list]]:
        """The table, locked: [number, offset, size, pid, birth] of each part."""
        lock = self.path.with_name(self.path.name + ".lock")
        table = self.path.with_name(self.path.name + ".table")
        with self._lock, open(lock, "a", encoding="utf-8") as locked:
            fcntl.flock(locked, fcntl.LOCK_EX)
            held = json.loads(table.read_text()) if table.exists() else []
            births = {pid: _birth(pid) for pid in {entry[3] for entry in held}}
            held = [entry for entry in held if births[entry[3]] == entry[4]]
            yield held
            # Renamed, so that a process killed here leaves the old table or the new.
            new = table.with_name(table.name + ".new")
            new.write_text(json.dumps(held))
            new.replace(table)

    def check(self, offset: int, size: int) -> None:
        """Raise unless an offset and a size may be transferred.

        Raises:
            ValueError: One of them is not a multiple of 4096.
        """
        for name, value in (("size", size), ("file_offset", offset)):
            if value % UNIT or value < 0:
                raise ValueError(f"rds: {name}={value} is not a multiple of {UNIT}")


@functools.cache
def _service_of(pid: int) -> Service:
    return Service()


def service() -> Service:
    """Return the service as this process uses it.

    Raises:
        ValueError: A setting cannot be read.
    """
    return _service_of(os.getpid())
