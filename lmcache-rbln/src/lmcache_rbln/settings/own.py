# SPDX-License-Identifier: Apache-2.0
"""Settings of this package: keys of extra configs, each family a dataclass.

The ``lmcache_rbln.*`` keys stand in vLLM's ``kv_connector_extra_config`` or in
LMCache's extra config (``LMCACHE_EXTRA_CONFIG``); where both name a key, vLLM's holds.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar
import difflib

# Local
from .masking import show

PREFIX = "lmcache_rbln."
RECOMPUTE = "recompute"
FAIL = "fail"
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_Family = TypeVar("_Family")


@dataclass(frozen=True)
class Setting:
    """What one key may be.

    Attributes:
        default: Its value where it is not given; its type is that of all values. A
            whole number is a ``float`` too.
        least, most, unit: The range of a number.
        words: All words that may be given, where it is no number.
        present: Returns the numbers that this machine has, where that is less than the
            range.
    """

    default: Any
    least: float = 0
    most: float = 0
    unit: str = ""
    words: tuple[str, ...] = ()
    present: Callable[[], list[int]] | None = None

    def wanted(self, value: Any) -> str:
        """Return what a value must be instead, or an empty text if it may be so."""
        if isinstance(self.default, bool):
            return "" if read_switch(value) is not None else "true or false"
        if self.words:
            return "" if value in self.words else "one of " + ", ".join(self.words)
        kinds = (int, float) if isinstance(self.default, float) else (int,)
        unit = f" {self.unit}" if self.unit else ""
        if isinstance(value, bool) or not isinstance(value, kinds):
            return f"a number of{unit}" if float in kinds else "a whole number"
        if not self.least <= value <= self.most:
            return f"from {self.least:.12g} to {self.most:.12g}{unit}"
        if self.present is not None and value not in (there := self.present()):
            return "one that this machine has: " + ", ".join(map(str, there))
        return ""


def setting(default: Any, **limits: Any) -> Any:
    """Return the dataclass field of a :class:`Setting`."""
    return field(default=default, metadata={"setting": Setting(default, **limits)})


def settings_of(family: type[Any], prefix: str) -> dict[str, Setting]:
    """Return what each key of a family may be."""
    return {prefix + one.name: one.metadata["setting"] for one in fields(family)}


def read_switch(value: object) -> bool | None:
    """Return what LMCache makes of a switch; None for what it takes for false."""
    is_plain = isinstance(value, bool | int | str)
    return _BOOLEANS.get(str(value).strip().lower()) if is_plain else None


def parse(
    family: type[_Family], prefix: str, *sources: Mapping[str, Any] | None
) -> _Family:
    """Read the settings of a family.

    Args:
        family: Its dataclass, of :func:`setting`.
        prefix: Begins its keys; others are somebody else's.
        sources: Extra configs; a later one overrides an earlier one.

    Returns:
        The settings, defaults for what no source names.

    Raises:
        ValueError: If a key is unknown or has a value that it can't have.
    """
    known, given = settings_of(family, prefix), {}
    for key, value in [pair for one in sources for pair in (one or {}).items()]:
        if not isinstance(key, str) or not key.startswith(prefix):
            continue
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.0)[0]
            raise ValueError(f"{key} is not a setting; did you mean {near}?")
        if wanted := known[key].wanted(value):
            shown = show(value, kind="number")
            raise ValueError(f"{key} must be {wanted}, got {shown}")
        kind = type(known[key].default)
        given[key[len(prefix) :]] = (read_switch if kind is bool else kind)(value)
    return family(**given)


@dataclass(frozen=True)
class Settings:
    """The ``lmcache_rbln.*`` settings.

    Attributes:
        allow_degraded: Whether to serve without a cache when LMCache can't start, with
            a warning; otherwise the engine does not start.
        load_failure_policy: What becomes of a request whose KV can't be loaded after
            all: ``recompute`` computes it, ``fail`` answers with an error.
    """

    allow_degraded: bool = setting(False)
    load_failure_policy: str = setting(RECOMPUTE, words=(RECOMPUTE, FAIL))

    @classmethod
    def parse(cls, *sources: Mapping[str, Any] | None) -> Settings:
        """Read the settings; see :func:`parse`."""
        return parse(cls, PREFIX, *sources)
