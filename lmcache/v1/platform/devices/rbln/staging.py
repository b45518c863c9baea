# SPDX-License-Identifier: Apache-2.0
"""Bounded pool of pinned host buffers between device copies and host copies.

One pool serves every thread of a process. It never grows past its capacity: a
transfer that finds no free buffer waits for another to give one back, so memory is
the same with one thread as with eight. A transfer waits only for its *first*
buffer, and a transfer that holds one can always finish, so waiting cannot deadlock.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable, Iterator
from contextlib import contextmanager
import os
import threading

# Third Party
import torch

#: Total staging memory of a process, in MiB.
STAGING_ENV_VAR = "LMCACHE_RBLN_STAGING_MIB"
DEFAULT_STAGING_MIB = 64
#: Bytes of one buffer. A copy of it spends little of its time on its fixed cost.
BUFFER_BYTES = 8 << 20
#: Buffers that one transfer uses at most: one is copied while one is transposed.
RING_BUFFERS = 2
#: Copies that are large anyway share one buffer in parts of this many bytes. A part
#: holds whole head-blocks of common models and stays in cache, so the host copy that
#: follows a device copy reads from there, and it starts early.
PART_BYTES = 2 << 20


class StagingPool:
    """A bounded set of equally sized host buffers, made on demand.

    Args:
        num_buffers: Buffers the pool may hold, at least 1.
        make_buffer: Makes one buffer; called without the pool's lock held.
    """

    def __init__(
        self, num_buffers: int, make_buffer: Callable[[], torch.Tensor]
    ) -> None:
        self._make_buffer = make_buffer
        self._free: list[torch.Tensor] = []
        self._lost: list[torch.Tensor] = []
        self._unmade = num_buffers
        self._capacity = num_buffers
        self._returned = threading.Condition()

    @contextmanager
    def ring(self, want: int) -> Iterator[list[torch.Tensor]]:
        """Borrow 1 to ``want`` buffers for the duration of a ``with`` block.

        The block must have no copy in flight on a buffer when it ends. A buffer that
        it cannot vouch for is taken out of the yielded list and passed to
        :meth:`quarantine`; it is then never handed out again.

        Args:
            want: Buffers the caller can use; more than one only if free right now.

        Yields:
            The borrowed buffers.

        Raises:
            RuntimeError: If every buffer of the pool is quarantined.
        """
        buffers = self._acquire(want)
        try:
            yield buffers
        finally:
            self.give_back(buffers)

    def give_back(self, buffers: list[torch.Tensor]) -> None:
        """Give buffers back before the ``with`` block ends.

        Args:
            buffers: Buffers taken out of a list that :meth:`ring` yielded, with no copy
                in flight.
        """
        with self._returned:
            self._free.extend(buffers)
            self._returned.notify_all()

    def quarantine(self, buffers: list[torch.Tensor]) -> None:
        """Keep buffers that a lost device may still write, and never reuse them.

        Args:
            buffers: Buffers taken out of a list that :meth:`ring` yielded.
        """
        with self._returned:
            self._lost.extend(buffers)
            self._returned.notify_all()

    def lent(self) -> int:
        """Return how many buffers are borrowed right now."""
        with self._returned:
            return self._capacity - self._unmade - len(self._free) - len(self._lost)

    def close(self) -> None:
        """Free the idle buffers; a transfer under way keeps its own until it ends."""
        with self._returned:
            self._unmade += len(self._free)
            self._free.clear()

    def _acquire(self, want: int) -> list[torch.Tensor]:
        with self._returned:
            self._returned.wait_for(
                lambda: self._free or self._unmade or len(self._lost) == self._capacity
            )
            taken = self._free[:want]
            del self._free[:want]
            to_make = min(want - len(taken), self._unmade)
            if not taken and not to_make:
                raise RuntimeError(
                    f"all {self._capacity} staging buffers are lost to device copies "
                    "that failed; restart the process to use the NPU again"
                )
            self._unmade -= to_make
        try:
            for _ in range(to_make):
                taken.append(self._make_buffer())
                to_make -= 1
        except BaseException:
            with self._returned:
                self._free.extend(taken)
                self._unmade += to_make
                self._returned.notify_all()
            raise
        return taken


def staging_buffers_setting() -> int:
    """Return how many staging buffers this process may hold.

    Returns:
        The setting ``LMCACHE_RBLN_STAGING_MIB`` (default 64) in buffers.

    Raises:
        ValueError: If the setting is not a whole number of MiB that fits a buffer.
    """
    raw = os.environ.get(STAGING_ENV_VAR, "").strip() or str(DEFAULT_STAGING_MIB)
    minimum = max(1, BUFFER_BYTES >> 20)
    if not raw.isascii() or not raw.isdigit() or int(raw) < minimum:
        raise ValueError(
            f"{STAGING_ENV_VAR}={raw!r} is not a whole number of MiB of at least "
            f"{minimum}; set for example {STAGING_ENV_VAR}={DEFAULT_STAGING_MIB}"
        )
    return (int(raw) << 20) // BUFFER_BYTES
