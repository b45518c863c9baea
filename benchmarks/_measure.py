# SPDX-License-Identifier: Apache-2.0
"""Times all contenders of a case in turn."""

# Future
from __future__ import annotations

# Standard
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any
import random
import signal
import time

# First Party
from benchmarks._cases import DIRECTIONS, Case, Row
from benchmarks._handover import Handovers
from benchmarks._samples import (
    GENERIC,
    Key,
    Sample,
    Samples,
    least_calls,
    near_calls,
    rows_of,
)
from benchmarks._session import Session, WrongBytesError

#: What one call of the generic operations may take. On HND layouts torch-rbln 0.12
#: looks for a way to copy the permuted device tensor and finds none for minutes.
GENERIC_LIMIT_S = 2.0
#: The generic operations are no target; they take part in the first rounds only.
GENERIC_ROUNDS = 3
#: Slow cases have fewer rounds, but never fewer than these.
_ENOUGH_S = 3.0
_LEAST_ROUNDS = 9
#: With fewer calls that count, all do.
_LEAST_KEPT = 5


class _TimeIsUp(BaseException):
    """A call took too long. No Exception: those are caught on the way."""


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise :class:`_TimeIsUp` in the main thread when the time is up."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Measurer:
    """Measures cases; remembers what the generic operations cannot do.

    Args:
        operations: Operations by contender.
        rounds: Calls of each contender that count; of slow cases fewer, but at least 9
            are made.
    """

    def __init__(self, operations: Mapping[str, Any], rounds: int) -> None:
        self._operations = operations
        self._rounds = rounds
        self._order = random.Random(0)
        self._handovers = Handovers()
        self._hopeless: dict[Key, str] = {}

    def measure(self, case: Case) -> list[Row]:
        """Verify and time one case.

        Returns:
            One row per direction and layout.

        Raises:
            WrongBytesError: If a contender moved wrong bytes.
            Exception: What ours, stock or the floor raised.
        """
        session = Session(case, self._operations)
        try:
            rows = []
            for direction in DIRECTIONS:
                rows += self._direction(session, direction)
            return rows
        finally:
            session.close()

    def _direction(self, session: Session, direction: str) -> list[Row]:
        failures: dict[Key, str] = {}
        running = []
        for salt, (contender, layout) in enumerate(session.contenders(), 1):
            reason = ""
            if contender == GENERIC:
                reason = self._try_generic(session, layout, direction, salt)
            else:
                session.verify(contender, layout, direction, salt)
            if reason:
                failures[contender, layout] = reason
            else:
                running.append((contender, layout))
        samples = self._time(session, direction, running)
        return rows_of(
            session.case,
            direction,
            samples,
            self._handovers.limit(),
            min(_LEAST_KEPT, self._rounds),
            failures,
        )

    def _time(
        self, session: Session, direction: str, running: list[Key]
    ) -> dict[Key, list[Sample]]:
        """Let the contenders take turns until each has enough calls that count."""
        samples: dict[Key, list[Sample]] = defaultdict(list)
        begin = time.monotonic()
        before = self._handovers.measure()
        turn = 0
        while turn < _LEAST_ROUNDS or time.monotonic() - begin < _ENOUGH_S:
            if turn >= self._rounds and self._enough(samples):
                break
            # Nobody always comes after the same other one, which leaves the caches
            # as it needs them.
            self._order.shuffle(running)
            for contender, layout in running:
                if contender != GENERIC or turn < GENERIC_ROUNDS:
                    seconds = session.run(contender, layout, direction)
                    after = self._handovers.measure()
                    sample = Sample(seconds, max(before, after))
                    samples[contender, layout].append(sample)
                    before = after
            turn += 1
        return samples

    def _enough(self, samples: Samples) -> bool:
        near = near_calls(samples, self._handovers.limit())
        return least_calls(near) >= self._rounds

    def _try_generic(
        self, session: Session, layout: str, direction: str, salt: int
    ) -> str:
        """Verify the generic operations, or return why they cannot be measured."""
        if session.case.threads > 1:
            return "measured with one thread only"
        known = self._hopeless.get((layout, direction))
        if known is not None:
            return known
        try:
            with _at_most(GENERIC_LIMIT_S):
                session.verify(GENERIC, layout, direction, salt)
            return ""
        except WrongBytesError:
            raise
        except _TimeIsUp:
            reason = f"not done after {GENERIC_LIMIT_S:g} s"
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
        self._hopeless[layout, direction] = reason
        return reason
