# SPDX-License-Identifier: Apache-2.0
"""Names of settings: which there are, and which one a misspelt name means."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from pathlib import Path
import importlib.util
import re

# Local
from . import table

_PREFIX = re.compile(r"^(LMCACHE_|lmcache\.)")
_VARIABLE = re.compile(r"LMCACHE_[A-Z0-9_]+")
# How alike a name must be to be taken for a misspelling: a slip of a letter or two.
_ALIKE = 0.9
# How settings begin that have no effect without what is off on RBLN.
_OFF_FAMILIES = ("pd_", "p2p_", "nixl_", "gds_", "maru_", "blend_")
# Variables on our path beside the settings.
_VARIABLES = (
    "LMCACHE_CONFIG_FILE",
    "LMCACHE_DEVICE_BACKEND",
    "LMCACHE_FORCE_SKIP_SAVE",
    "LMCACHE_RBLN_KV_LAYOUT",
    "LMCACHE_RBLN_STAGING_MIB",
    "LMCACHE_RBLN_TRANSPOSE_THREADS",
)


def supported() -> list[str]:
    """Return the settings that have an effect on RBLN."""
    return [
        name
        for name in table.definitions()
        if name not in table.OFF and not name.startswith(_OFF_FAMILIES)
    ]


def supported_variables() -> list[str]:
    """Return the variables that have an effect on RBLN."""
    return [*(f"LMCACHE_{name.upper()}" for name in supported()), *_VARIABLES]


def meant(name: str, candidates: Iterable[str]) -> str:
    """Return the name of which another is a misspelling; empty if of none.

    Args:
        name: A name that is not read, with its prefix.
        candidates: Names with theirs.
    """
    # What all of them begin with would make all of them alike.
    bare = {_PREFIX.sub("", candidate): candidate for candidate in candidates}
    near = get_close_matches(_PREFIX.sub("", name), sorted(bare), 1, _ALIKE)
    return bare[near[0]] if near else ""


def is_variable_of_lmcache(variable: str) -> bool:
    """Return whether a variable's name, or how it begins, is in LMCache's sources."""
    known = _known_variables()
    families = tuple(n for n in known if n.endswith("_") and n != "LMCACHE_")
    return variable in known or variable.startswith(families)


def is_internal(name: str) -> bool:
    """Return whether a name is LMCache's own in its configuration, and no setting.

    Such a key of vLLM's ``kv_connector_extra_config`` replaces a method or a record.
    """
    # First Party
    from lmcache.v1.config import LMCacheEngineConfig

    return name not in table.definitions() and (
        name.startswith("_") or hasattr(LMCacheEngineConfig, name)
    )


@cache
def _known_variables() -> frozenset[str]:
    """Return every ``LMCACHE_*`` name in LMCache's sources."""
    found: set[str] = set()
    spec = importlib.util.find_spec("lmcache")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in Path(folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8", errors="replace")
            found.update(_VARIABLE.findall(text))
    return frozenset(found)
