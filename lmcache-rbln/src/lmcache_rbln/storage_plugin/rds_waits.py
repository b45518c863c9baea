# SPDX-License-Identifier: Apache-2.0
"""How long a store or a restore may wait for staging memory: ``rds_wait_timeout``."""

# Standard
from collections.abc import Callable
import threading
import time
import weakref

# First Party
from lmcache.v1.memory_management import MemoryObj

SecondsLeft = Callable[[], float]


def deadline_in(seconds: float) -> SecondsLeft:
    """Return a function that tells how many of these seconds are left.

    Args:
        seconds: From now.
    """
    end = time.monotonic() + seconds
    return lambda: end - time.monotonic()


class StoreWaits(threading.local):
    """What is left of the time-out to the store that a thread is putting together.

    LMCache asks for one chunk after the other and hands them over together, all in one
    thread. The time-out is for all of them: a store of many chunks on a slow NVMe must
    not hold up the engine once per chunk.

    Args:
        timeout: Longest wait of one store, in seconds.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._left = timeout
        # The first chunk of the store, as long as anybody holds it.
        self._first: weakref.ref[MemoryObj] | None = None

    def left(self) -> SecondsLeft:
        """Return a function for one wait that tells how many seconds it has left."""
        first = None if self._first is None else self._first()
        if first is None or not first.is_valid():
            # Its chunks were given back and never handed over: their gather failed.
            self.end()
        return deadline_in(self._left)

    def waited(self, seconds_left: SecondsLeft, obj: MemoryObj) -> None:
        """Note the end of a wait.

        Args:
            seconds_left: What :meth:`left` returned for it.
            obj: What it was for.
        """
        self._left = min(self._left, max(0.0, seconds_left()))
        if self._first is None:
            self._first = weakref.ref(obj)

    def end(self) -> None:
        """The store was handed over or given up; the next one has all of its time."""
        self._left = self._timeout
        self._first = None
