# SPDX-License-Identifier: Apache-2.0
"""Timed calls, which of them count, and their medians. Pure."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping, Sequence
from typing import NamedTuple
import statistics

# First Party
from benchmarks._cases import Case, Row

FLOOR = "floor"
STOCK = "stock"
GENERIC = "generic"
OURS = "ours"


class Sample(NamedTuple):
    """One timed call.

    Attributes:
        seconds: What it took.
        handover: Seconds of a handover between CPUs, before or after it: the longer.
    """

    seconds: float
    handover: float


#: A contender with the layout it works on.
Key = tuple[str, str]
Samples = Mapping[Key, Sequence[Sample]]


def near_calls(samples: Samples, limit: float) -> dict[Key, list[Sample]]:
    """Return the calls beside which handovers took no longer than a limit.

    Those of the generic operations are few and no target: all of them count.
    """
    return {
        key: [s for s in own if key[0] == GENERIC or s.handover <= limit]
        for key, own in samples.items()
    }


def least_calls(samples: Samples) -> int:
    """Return how many calls the contender with the fewest has, without generic."""
    return min(len(own) for key, own in samples.items() if key[0] != GENERIC)


def rows_of(
    case: Case,
    direction: str,
    samples: Samples,
    limit: float,
    least: int,
    failures: Mapping[Key, str],
) -> list[Row]:
    """Arrange what was measured in rows.

    Args:
        case: The case.
        direction: ``gather`` or ``scatter``.
        samples: All timed calls.
        limit: Longest handover, in seconds, beside calls that count.
        least: With fewer calls of any contender that count, all do.
        failures: Reasons by contender and layout.

    Returns:
        One row per layout. Floor and stock are the same in all of them.
    """
    kept: Samples = near_calls(samples, limit)
    far = 1 - sum(map(len, kept.values())) / sum(map(len, samples.values()))
    if least_calls(kept) < least:
        kept = samples
    rows = []
    for layout in case.geometry.layouts:
        keys = [key for key in samples if key[1] == layout or key[0] in (FLOOR, STOCK)]
        reasons = {
            who: why for (who, where), why in failures.items() if where == layout
        }
        row = Row(case, layout, direction, _medians(kept, keys), {}, reasons)
        row.seconds_of_all = _medians(samples, keys)
        row.calls = {key[0]: (len(kept[key]), len(samples[key])) for key in keys}
        row.far = far
        rows.append(row)
    return rows


def _medians(samples: Samples, keys: Sequence[Key]) -> dict[str, float]:
    return {
        key[0]: statistics.median(sample.seconds for sample in samples[key])
        for key in keys
    }
