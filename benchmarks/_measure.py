# SPDX-License-Identifier: Apache-2.0
"""Times all contenders of a case in turn."""

# Standard
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any
import random
import statistics
import time

# First Party
from benchmarks._cases import FLOOR, GATHER, GENERIC, SCATTER, STOCK, Case, Row
from benchmarks._session import Session

#: The generic operations are no target; they take part in the first rounds only.
GENERIC_ROUNDS = 3
#: Slow cases have fewer rounds, but never fewer than these; quick ones take longer than
#: most disturbances.
_LEAST_ROUNDS = 9
_LEAST_S, _ENOUGH_S = 1.0, 3.0


def quick(seconds: list[float]) -> float:
    """Return the time that a quarter of the calls stay within.

    Not the median: the host of a virtual machine may run its two CPUs on cores of
    different chips, for some milliseconds or seconds. Whatever uses both CPUs at once
    then takes twice as long, while a copy on one of them takes as long as ever.
    """
    return statistics.quantiles(seconds, n=4, method="inclusive")[0]


def measure(case: Case, operations: Mapping[str, Any], rounds: int) -> list[Row]:
    """Verify and time one case.

    Args:
        case: The case.
        operations: Operations by contender.
        rounds: Calls of each contender, at least; of slow cases fewer.

    Returns:
        One row per direction and layout. Floor and stock are the same in all layouts.

    Raises:
        WrongBytesError: If a contender moved wrong bytes.
    """
    session = Session(case, operations)
    order, rows = random.Random(0), []
    try:
        for direction in (GATHER, SCATTER):
            running = list(session.contenders())
            for contender, layout in running:
                session.verify(contender, layout, direction)
            samples: dict[tuple[str, str], list[float]] = defaultdict(list)
            for turn in _turns(rounds):
                # Nobody always comes after the same other one, which leaves the caches
                # as it needs them.
                order.shuffle(running)
                for contender, layout in running:
                    if contender != GENERIC or turn < GENERIC_ROUNDS:
                        seconds = session.run(contender, layout, direction)
                        samples[contender, layout].append(seconds)
            for layout in case.geometry.layouts:
                seconds_of = {
                    who: quick(own)
                    for (who, where), own in samples.items()
                    if where == layout or who in (FLOOR, STOCK)
                }
                rows.append(Row(case, layout, direction, seconds_of))
    finally:
        session.close()
    return rows


def _turns(rounds: int) -> Iterator[int]:
    begin, turn = time.monotonic(), 0
    while True:
        yield turn
        turn += 1
        elapsed = time.monotonic() - begin
        if turn >= rounds and elapsed >= _LEAST_S:
            return
        if turn >= min(rounds, _LEAST_ROUNDS) and elapsed >= _ENOUGH_S:
            return
