# SPDX-License-Identifier: Apache-2.0
"""When queued transfers run in deferred mode: ``RBLN_SIM_DEFERRED``."""

import itertools
import random
from typing import TypeVar

T = TypeVar("T")


class Order:
    """Chooses among queued transfers, by nothing but the calls so far and a seed.

    Args:
        setting: ``latest``, ``earliest`` or a seed; the runtime has checked it.
    """

    def __init__(self, setting: str) -> None:
        self._setting = setting
        self._calls = itertools.count()

    def take(self, queued: list[T], waited_for: bool) -> list[T]:
        """Take out of a queue what is to run now.

        Args:
            queued: The queue; what is returned leaves it.
            waited_for: Whether the caller waits for all of them.

        Returns:
            Transfers, in the order to run them in.
        """
        if self._setting == "latest":
            taken = queued[::-1] if waited_for else []
        elif self._setting == "earliest":
            taken = list(queued)
        else:
            chance = random.Random(f"{self._setting} {next(self._calls)}")
            count = len(queued) if waited_for else chance.randint(0, len(queued))
            taken = chance.sample(queued, count)
        queued[:] = [transfer for transfer in queued if transfer not in taken]
        return taken
