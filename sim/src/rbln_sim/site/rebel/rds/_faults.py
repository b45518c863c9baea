# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with the simulated storage: ``RBLN_SIM_RDS_FAULTS``.

The grammar follows that of ``RBLN_SIM_FAULTS``::

    RULES = RULE {"," RULE}
    RULE  = ("eio" | "enospc" | "torn") ":" KIND ":" WHEN ["+sticky"]
          | "delay" ":" KIND ":" WHEN ":" TIME ["+sticky"]
          | "lost" ":" COUNT
    KIND  = "alloc" | "write" | "read" | "any"
    WHEN  = NUMBER | "p=" PROBABILITY
    TIME  = NUMBER ("us" | "ms" | "s")

``@PATH`` instead of rules names a file of rules, which may change at any time.
"""

import errno
import os
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Sleep = Callable[[float], None]

KINDS = ("alloc", "write", "read")
# What an action may strike.
_ACTIONS = {
    "eio": (*KINDS, "any"),
    "enospc": ("alloc", "write"),
    "torn": ("write",),
    "delay": (*KINDS, "any"),
}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_EXAMPLES = (
    "eio:write:3, enospc:alloc:p=0.1, torn:write:2, delay:read:1:20ms+sticky or lost:25"
)


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        text: As it was written.
        action: ``eio``, ``enospc``, ``torn``, ``delay`` or ``lost``.
        kind: Operations that it counts; ``any`` is all of them.
        position: The operation, from 1, that it strikes; for ``lost`` the number of
            operations that are still done; 0: by probability.
        probability: With which it strikes each operation.
        seconds: How long ``delay`` takes.
        sticky: Whether it strikes all later operations of the kind too.
    """

    text: str
    action: str
    kind: str = "any"
    position: int = 0
    probability: float = 0.0
    seconds: float = 0.0
    sticky: bool = False


def _parse_one(text: str) -> Rule:
    def bad(why: str) -> ValueError:
        return ValueError(
            f"RBLN_SIM_RDS_FAULTS: cannot read the rule '{text}': {why}; rules look "
            f"like {_EXAMPLES}"
        )

    body = text.removesuffix("+sticky")
    sticky = body != text
    action, *fields = body.split(":")
    if action == "lost":
        if sticky or len(fields) != 1 or not fields[0].isdecimal():
            raise bad("'lost' takes the number of operations that are still done")
        return Rule(text, action, position=int(fields[0]))
    if action not in _ACTIONS:
        raise bad(f"there is no action '{action}'")
    if len(fields) != (3 if action == "delay" else 2):
        raise bad(f"it has {len(fields) + 1} fields")
    kind, when = fields[:2]
    if kind not in _ACTIONS[action]:
        raise bad(f"'{action}' strikes {', '.join(_ACTIONS[action])}, not '{kind}'")
    position, probability, seconds = 0, 0.0, 0.0
    if when.isdecimal() and int(when) > 0:
        position = int(when)
    elif re.fullmatch(r"p=(1|1?\.0+|0?\.\d+)", when) and float(when[2:]) > 0:
        probability = float(when[2:])
    else:
        raise bad(f"'{when}' is neither a position from 1 nor p= and a probability")
    if action == "delay":
        match = re.fullmatch(r"(\d+)(us|ms|s)", fields[2])
        if match is None:
            raise bad(f"'{fields[2]}' is not a time with us, ms or s")
        seconds = int(match[1]) * _SECONDS[match[2]]
    return Rule(text, action, kind, position, probability, seconds, sticky)


def parse(text: str) -> tuple[Rule, ...]:
    """Read rules.

    Args:
        text: The setting's value; empty for none.

    Raises:
        ValueError: A rule cannot be read; the message names it.
    """
    return tuple(_parse_one(rule) for rule in text.split(",")) if text else ()


class Schedule:
    """Decides which operation is struck, by rules and a seed.

    Args:
        rules: The rules.
        seed: Of the probabilities.
        sleep: How ``delay`` takes its time.
    """

    def __init__(
        self, rules: Sequence[Rule], seed: int, sleep: Sleep = time.sleep
    ) -> None:
        self._rules = rules
        self._seed = seed
        self._sleep = sleep
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._struck: set[Rule] = set()

    def begin(self, kind: str) -> str | None:
        """Count an operation, and let it fail or wait if a rule says so.

        Args:
            kind: ``alloc``, ``write`` or ``read``.

        Returns:
            ``torn`` if only its first half is to be done, else ``None``.

        Raises:
            OSError: ``EIO``, ``ENOSPC``, or ``ENODEV`` for a lost device.
        """
        rule = self._next(kind)
        if rule is None:
            return None
        if rule.action == "delay":
            self._sleep(rule.seconds)
            return None
        if rule.action == "torn":
            return "torn"
        code = {"eio": errno.EIO, "enospc": errno.ENOSPC, "lost": errno.ENODEV}
        number = code[rule.action]
        raise OSError(number, f"rds {kind}: {os.strerror(number)} (fault {rule.text})")

    def _next(self, kind: str) -> Rule | None:
        if not self._rules:
            return None
        with self._lock:
            self._counts[kind] += 1
            self._counts["any"] += 1
            hits = [
                rule
                for number, rule in enumerate(self._rules)
                if rule.kind in (kind, "any")
                and self._strikes(number, rule, self._counts[rule.kind])
            ]
            for rule in hits:
                if rule not in self._struck:
                    print(
                        f"rbln-sim: fault: {rule.text} strikes rds {kind} "
                        f"{self._counts[kind]}, seed {self._seed}",
                        file=sys.stderr,
                    )
            self._struck.update(hits)
        return hits[0] if hits else None

    def _strikes(self, number: int, rule: Rule, count: int) -> bool:
        if rule.action == "lost":
            return count > rule.position
        if rule.sticky and rule in self._struck:
            return True
        if rule.position:
            return count == rule.position
        chance = random.Random(f"{self._seed} {number} {count}").random()
        return chance < rule.probability


class FileSchedule:
    """A schedule whose rules lie in a file, and change with it.

    With a new file in its place operations are counted from 1 again, and no rule from
    before is in force.

    Args:
        path: The file; whoever changes it must rename a new one into its place.
        seed: Of the probabilities.
        sleep: As for :class:`Schedule`.

    Raises:
        ValueError: The file cannot be read, or a rule in it.
    """

    def __init__(self, path: Path, seed: int, sleep: Sleep = time.sleep) -> None:
        self._path = path
        self._seed = seed
        self._sleep = sleep
        self._lock = threading.Lock()
        self._version: tuple[int, int] | None = None
        self._schedule = Schedule((), seed, sleep)
        self._current()

    def begin(self, kind: str) -> str | None:
        """Count an operation by the rules of now; see :meth:`Schedule.begin`.

        Raises:
            ValueError: The rules cannot be read.
        """
        return self._current().begin(kind)

    def _current(self) -> Schedule:
        with self._lock:
            try:
                with self._path.open(encoding="utf-8") as file:
                    stat = os.fstat(file.fileno())
                    version = (stat.st_ino, stat.st_mtime_ns)
                    if version != self._version:
                        rules = parse(file.read().strip())
                        self._schedule = Schedule(rules, self._seed, self._sleep)
                        self._version = version
            except OSError as error:
                raise ValueError(
                    f"RBLN_SIM_RDS_FAULTS=@{self._path}: {error.strerror}"
                ) from error
            return self._schedule


def schedule_of(
    setting: str, seed: int, sleep: Sleep = time.sleep
) -> Schedule | FileSchedule:
    """Return the schedule that a setting asks for.

    Args:
        setting: Rules, or ``@`` and the path of a file of rules.
        seed: Of the probabilities.
        sleep: How ``delay`` takes its time.

    Raises:
        ValueError: The setting cannot be read.
    """
    if setting.startswith("@"):
        return FileSchedule(Path(setting[1:]), seed, sleep)
    return Schedule(parse(setting), seed, sleep)
