# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a setting."""

# Future
from __future__ import annotations

# Standard
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A setting that does not do what it says.

    Attributes:
        setting: Its name, without the place where it stands.
        found: What stands there, without secrets.
        wanted: What should.
        fix: What to do, with the name of the place.
        harmless: Whether serving works all the same, without the setting.
    """

    setting: str
    found: str
    wanted: str
    fix: str
    harmless: bool = False

    def __str__(self) -> str:
        return f"{self.found}, wanted {self.wanted}; {self.fix}"
