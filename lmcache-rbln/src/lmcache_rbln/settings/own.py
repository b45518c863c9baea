# SPDX-License-Identifier: Apache-2.0
"""Settings of this package: the ``lmcache_rbln.*`` keys.

They stand in vLLM's ``kv_connector_extra_config`` or in LMCache's extra config
(``LMCACHE_EXTRA_CONFIG``); where both name a key, vLLM's holds.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any
import difflib

# Local
from .masking import show

PREFIX = "lmcache_rbln."
RECOMPUTE = "recompute"
FAIL = "fail"
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Settings:
    """What can be set.

    Attributes:
        allow_degraded: Whether to serve without a cache when LMCache can't start, with
            a warning; otherwise the engine does not start.
        load_failure_policy: What becomes of a request whose KV can't be loaded after
            all: ``recompute`` computes it, ``fail`` answers with an error.
    """

    allow_degraded: bool = False
    load_failure_policy: str = RECOMPUTE

    @classmethod
    def parse(cls, *sources: Mapping[str, Any] | None) -> Settings:
        """Read the settings.

        Args:
            sources: Extra configs; a later one overrides an earlier one. Keys without
                the prefix are somebody else's.

        Returns:
            The settings, defaults for what no source names.

        Raises:
            ValueError: If a key is unknown or a value is not among those allowed.
        """
        known = [field.name for field in fields(cls)]
        values: dict[str, Any] = {}
        for source in sources:
            for key, value in (source or {}).items():
                if not isinstance(key, str) or not key.startswith(PREFIX):
                    continue
                name = key[len(PREFIX) :]
                if name not in known:
                    near = difflib.get_close_matches(name, known, 1, 0.0)[0]
                    raise ValueError(
                        f"{key} is no setting of lmcache-rbln; did you mean "
                        f"{PREFIX}{near}?"
                    )
                values[name] = value
        if "allow_degraded" in values:
            values["allow_degraded"] = _boolean(
                f"{PREFIX}allow_degraded", values["allow_degraded"]
            )
        policy = values.get("load_failure_policy", RECOMPUTE)
        if policy not in (RECOMPUTE, FAIL):
            raise ValueError(
                f"{PREFIX}load_failure_policy wants {RECOMPUTE!r} or {FAIL!r}, got "
                f"{show(policy)}"
            )
        return cls(**values)


def _boolean(key: str, value: object) -> bool:
    """Return a boolean, also from its usual spellings, or refuse the value."""
    known = None if value is None else _BOOLEANS.get(str(value).strip().lower())
    if known is None:
        raise ValueError(f"{key} wants true or false, got {show(value, kind='number')}")
    return known
