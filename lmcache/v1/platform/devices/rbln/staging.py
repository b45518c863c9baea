# SPDX-License-Identifier: Apache-2.0
"""Bounded pool of pinned host buffers between device copies and host copies.

One pool serves every thread of a process. It never grows past its capacity: a
transfer that finds no free buffer waits for another to give one back, so memory is
the same with one thread as with eight. Those who wait are served in order. A transfer
waits only for its turn and its *first* buffer, and a transfer that holds one can always
finish, so waiting cannot deadlock.
"""

# Future
from __future__ import annotations

# Standard
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar
import os
import queue
import threading
import weakref

# Third Party
import torch

# First Party
from lmcache.logging import init_logger

logger = init_logger(__name__)

_Result = TypeVar("_Result")

#: Total staging memory of a process, in MiB.
STAGING_ENV_VAR = "LMCACHE_RBLN_STAGING_MIB"
DEFAULT_STAGING_MIB = 64
#: Bytes of one buffer. A copy of it spends little of its time on its fixed cost.
BUFFER_BYTES = 8 << 20
#: Buffers that one transfer uses at most: one is copied while one is transposed.
RING_BUFFERS = 2
#: Copies that are large anyway share one buffer in so many parts of this many bytes, or
#: of the largest piece. They stay in cache, so the host copy that follows a device copy
#: reads from there, and it starts early.
PARTS = 4
PART_BYTES = 1 << 20

#: Seconds after which a waiting transfer looks again by itself: a transfer that was
#: interrupted at a bad moment may not have told that its buffers are back, and nobody
#: tells that all are lost.
_LOOK_AGAIN = 0.5


class once(Generic[_Result]):  # noqa: N801
    """A function that runs once a process, also where first calls race.

    Others wait for it. Arguments of later calls are not looked at.
    """

    def __init__(self, function: Callable[..., _Result]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._results: list[_Result] = []

    def __call__(self, *arguments: object) -> _Result:
        if not self._results:
            with self._lock:
                if not self._results:
                    self._results.append(self._function(*arguments))
        return self._results[0]

    def cache_clear(self) -> None:
        """Let it run again."""
        self._results = []


class _Slot:
    """Room for one buffer of a pool. Whether it is lent follows from its borrower.

    Attributes:
        buffer: The buffer, once it is made.
        loan: Who borrowed it last.
        busy: Whether copies may be in flight on the buffer.
    """

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None
        self.loan: weakref.ref[Loan] | None = None
        self.busy = False

    def lent(self) -> bool:
        """Return whether the borrower is there and has not given the buffer back."""
        loan = self.loan() if self.loan is not None else None
        return loan is not None and not loan.ended and self in loan.slots


class Loan:
    """Buffers borrowed from a pool until the ``with`` block ends.

    Whoever issues copies calls :meth:`begin_copies` before, and :meth:`end_copies` when
    it knows that they are complete. A buffer that comes back in between may still be
    written by the device, so it is never lent again. Buffers also come back if the loan
    is dropped, so that nothing is lost wherever an interrupt strikes.

    Attributes:
        slots: Where the buffers come from.
        ended: Whether they have been given back.
        called: Has an item when the pool may have a buffer. It is written in C: no
            interrupt leaves it half taken.
    """

    def __init__(self, pool: StagingPool) -> None:
        self._pool = pool
        self.called: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.slots: list[_Slot] = []
        self.ended = False

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The borrowed buffers."""
        return [slot.buffer for slot in self.slots if slot.buffer is not None]

    @property
    def copying(self) -> bool:
        """Whether copies may be in flight on the buffers."""
        return any(slot.busy for slot in self.slots)

    def begin_copies(self) -> None:
        """Copies will be in flight on the buffers."""
        for slot in self.slots:
            slot.busy = True

    def end_copies(self) -> None:
        """No copy is in flight on the buffers."""
        for slot in self.slots:
            slot.busy = False

    def keep(self, count: int) -> None:
        """Give all but the first ``count`` buffers back early."""
        self.slots = self.slots[:count]
        self._pool.wake()

    def keep_made(self) -> None:
        """Give back what has no buffer."""
        if any(slot.buffer is None for slot in self.slots):
            self.slots = [slot for slot in self.slots if slot.buffer is not None]
            self._pool.wake()

    def __enter__(self) -> Loan:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = True
        self._pool.wake()


class StagingPool:
    """A bounded set of equally sized buffers, made on demand.

    Args:
        num_buffers: Buffers the pool may hold, at least 1.
        make_buffer: Makes one buffer; called without the pool's lock held.
        max_loans: Loans at a time, by default as many as there are buffers.

    Attributes:
        loans: How many there have been, without those that still wait.
    """

    def __init__(
        self,
        num_buffers: int,
        make_buffer: Callable[[], torch.Tensor],
        max_loans: int | None = None,
    ) -> None:
        self._make_buffer = make_buffer
        self._max_loans = max_loans or num_buffers
        self._slots = [_Slot() for _ in range(num_buffers)]
        # Those who have no buffer yet, the first one being served.
        self._line: deque[weakref.ref[Loan]] = deque()
        self._lock = threading.Lock()
        self._warned = False
        self.loans = 0

    def borrow(self, want: int) -> Loan:
        """Borrow 1 to ``want`` buffers, in order of arrival.

        Args:
            want: Buffers the caller can use; more than one only if free right now.

        Returns:
            The loan, for a ``with`` block.

        Raises:
            RuntimeError: If every buffer of the pool is lost to copies that failed.
            Exception: If no buffer can be made, and none is there to wait for.
        """
        loan = Loan(self)
        try:
            self._fill(loan, want)
            self.wake()
        except BaseException:
            # Whoever keeps the exception must not keep a place in the line.
            loan.__exit__()
            raise
        return loan

    def lent(self) -> int:
        """Return how many buffers are borrowed right now."""
        with self._lock:
            return sum(slot.lent() for slot in self._slots)

    def lost(self) -> int:
        """Return how many buffers came back with copies in flight."""
        with self._lock:
            return sum(slot.busy and not slot.lent() for slot in self._slots)

    def wake(self) -> None:
        """Let the first in line look again, if there is something for it."""
        with self._lock:
            first = self._first_in_line() if self._line and self._free() else None
        if first is not None:
            first.called.put(None)

    def close(self) -> None:
        """Free the idle buffers; a transfer under way keeps its own until it ends."""
        with self._lock:
            for slot in self._slots:
                if not slot.busy and not slot.lent():
                    slot.buffer = None

    def _fill(self, loan: Loan, want: int) -> None:
        """Wait in line until the loan has 1 to ``want`` buffers."""
        with self._lock:
            self._line.append(weakref.ref(loan))
        failure: Exception | None = None
        while True:
            self._assign(loan, want, failure)
            try:
                for slot in loan.slots:
                    if slot.buffer is None:
                        slot.buffer = self._make_buffer()
            except Exception as exc:
                # Without the frames, which would keep a loan that is dropped.
                failure = exc.with_traceback(None)
                self._warn_of_fewer(exc)
                loan.keep_made()
                if not loan.slots:
                    # There may be one by now that somebody else has made.
                    continue
            if loan.slots:
                break
            with suppress(queue.Empty):
                loan.called.get(timeout=_LOOK_AGAIN)
        with self._lock:
            self.loans += 1
            self._line.popleft()

    def _assign(self, loan: Loan, want: int, failure: Exception | None) -> None:
        """Lend the first in line up to ``want`` slots, those with a buffer first.

        After a failure to make a buffer only such slots, and if there is nobody to wait
        for either, it is raised.
        """
        with self._lock:
            if all(slot.busy and not slot.lent() for slot in self._slots):
                raise RuntimeError(
                    f"all {len(self._slots)} staging buffers are lost to device copies "
                    "that failed; restart the process to use the NPU again"
                )
            if self._first_in_line() is not loan:
                return
            free = self._free()
            if failure is not None:
                free = [slot for slot in free if slot.buffer is not None]
                if not free and not any(slot.lent() for slot in self._slots):
                    raise failure
            free.sort(key=lambda slot: slot.buffer is None)
            for slot in free[:want]:
                slot.loan = weakref.ref(loan)
                loan.slots.append(slot)

    def _first_in_line(self) -> Loan | None:
        """Return who is to be served next; the lock is held."""
        while self._line:
            first = self._line[0]()
            if first is not None and not first.ended:
                return first
            self._line.popleft()
        return None

    def _free(self) -> list[_Slot]:
        """Return what may be lent now; the lock is held."""
        lent = [slot for slot in self._slots if slot.lent()]
        if len({slot.loan() for slot in lent if slot.loan}) >= self._max_loans:
            return []
        return [slot for slot in self._slots if not slot.busy and slot not in lent]

    def _warn_of_fewer(self, exc: Exception) -> None:
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            logger.warning(
                "RBLN transfers share fewer than %d staging buffers and may be slower; "
                "another one can't be made: %s",
                len(self._slots),
                exc,
            )


def max_transfers() -> int:
    """Return how many transfers of a process stage at a time; others wait.

    Each keeps a CPU busy. With more of them than CPUs none is done sooner, and they
    push one another's staging out of the cache.
    """
    # Of the main thread: others may be bound to fewer.
    return len(os.sched_getaffinity(os.getpid()))


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
