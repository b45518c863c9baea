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
import signal
import statistics
import time

# First Party
from benchmarks._cases import DIRECTIONS, Case, Row
from benchmarks._session import FLOOR, GENERIC, OURS, STOCK, Session, WrongBytesError

#: What one call of the generic operations may take. On HND layouts torch-rbln 0.12
#: looks for a way to copy the permuted device tensor and finds none for minutes.
GENERIC_LIMIT_S = 2.0
#: The generic operations are no target; they take part in the first rounds only.
GENERIC_ROUNDS = 3
#: Large cases have fewer rounds, but never fewer than these.
_ENOUGH_S = 1.5
_LEAST_ROUNDS = 5


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
        rounds: Timed calls of each contender; of large cases at least 5.
    """

    def __init__(self, operations: Mapping[str, Any], rounds: int) -> None:
        self._operations = operations
        self._rounds = rounds
        self._hopeless: dict[tuple[str, str], str] = {}

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
        failures: dict[tuple[str, str], str] = {}
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
        times: dict[tuple[str, str], list[float]] = defaultdict(list)
        begin = time.monotonic()
        for turn in range(self._rounds):
            if turn >= _LEAST_ROUNDS and time.monotonic() - begin > _ENOUGH_S:
                break
            # Nobody is always first after the same other one.
            start = turn % len(running)
            for contender, layout in running[start:] + running[:start]:
                if contender != GENERIC or turn < GENERIC_ROUNDS:
                    seconds = session.run(contender, layout, direction)
                    times[contender, layout].append(seconds)
        medians = {key: statistics.median(values) for key, values in times.items()}
        return rows_of(session.case, direction, medians, failures)

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


def rows_of(
    case: Case,
    direction: str,
    medians: Mapping[tuple[str, str], float],
    failures: Mapping[tuple[str, str], str],
) -> list[Row]:
    """Arrange what was measured in rows.

    Args:
        case: The case.
        direction: ``gather`` or ``scatter``.
        medians: Seconds by contender and layout.
        failures: Reasons by contender and layout.

    Returns:
        One row per layout. Floor and stock are the same in all of them.
    """
    rows = []
    shared = {
        contender: seconds
        for (contender, _), seconds in medians.items()
        if contender in (FLOOR, STOCK)
    }
    for layout in case.geometry.layouts:
        own = {
            contender: medians[contender, layout]
            for contender in (OURS, GENERIC)
            if (contender, layout) in medians
        }
        reasons = {
            who: why for (who, where), why in failures.items() if where == layout
        }
        rows.append(Row(case, layout, direction, {**shared, **own}, {}, reasons))
    return rows
