# SPDX-License-Identifier: Apache-2.0
"""How long memory takes from one CPU to the other, while a benchmark runs.

A host may run the two CPUs of a virtual machine on cores of different chips, for some
milliseconds or seconds, as it likes. What one CPU has read the other then overwrites
three times as slowly, and whatever uses both CPUs at once takes twice as long, while a
copy on one of them takes as long as ever. Such times compare hosts, not contenders.
"""

# Future
from __future__ import annotations

# Standard
from concurrent.futures import ThreadPoolExecutor
import math
import os
import statistics
import time

# Third Party
import numpy as np

#: Bytes that are handed over: few enough for every cache.
_BYTES = 128 << 10
#: The first one also wakes the other thread.
_HANDOVERS = 3
#: On our machine 7 to 17 us, or 25 to 40 on different chips.
_FAR = 2.2


class Handovers:
    """Measures handovers between the two CPUs of this process.

    With one CPU, or with more than two, nobody knows which ones the contenders use:
    nothing is measured then.
    """

    def __init__(self) -> None:
        self._cpus = sorted(os.sched_getaffinity(0))
        self._measured: list[float] = []
        self._shared = np.ones(_BYTES, dtype=np.uint8)
        self._source = np.ones_like(self._shared)
        self._target = np.ones_like(self._shared)
        self._other = ThreadPoolExecutor(1)

    def measure(self) -> float:
        """Return the seconds of a handover right now; 0.0 if there are no two CPUs."""
        if len(self._cpus) != 2:
            return 0.0
        here, there = self._cpus
        times = []
        os.sched_setaffinity(0, {here})
        try:
            for _ in range(_HANDOVERS):
                times.append(self._other.submit(self._write, there).result())
                np.copyto(self._target, self._shared)
        finally:
            os.sched_setaffinity(0, self._cpus)
        self._measured.append(min(times[1:]))
        return self._measured[-1]

    def _write(self, cpu: int) -> float:
        """Overwrite on a CPU what the other one has read; return the seconds."""
        os.sched_setaffinity(0, {cpu})
        begin = time.perf_counter()
        np.copyto(self._shared, self._source)
        return time.perf_counter() - begin

    def limit(self) -> float:
        """Return the longest handover, in seconds, of CPUs near each other.

        It is a multiple of the quick ones so far, the quickest twentieth.
        """
        if len(self._measured) < 2:
            return math.inf
        quick = statistics.quantiles(self._measured, n=20, method="inclusive")[0]
        return _FAR * quick
