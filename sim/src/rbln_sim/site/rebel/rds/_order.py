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
        order = list(queued)
        count = len(order) if waited_for or self._setting == "earliest" else 0
        if self._setting == "latest":
            order.reverse()
        elif self._setting != "earliest":
            chance = random.Random(f"{self._setting} {next(self._calls)}")
            chance.shuffle(order)
            count = count or chance.randint(0, len(order))
        queued[:] = order[count:]
        return order[:count]
