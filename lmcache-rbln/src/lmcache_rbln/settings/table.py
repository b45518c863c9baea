# SPDX-License-Identifier: Apache-2.0
"""What LMCache's settings may be: LMCache's own definitions, and what they leave open.

LMCache reads a malformed switch as off, rounds a number down without a word, and goes
on with ``None`` for what it can't convert.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
import importlib.util
import json
import math
import re
import typing

# Local
from .masking import show
from .own import read_switch

_GIB = (0, 1 << 16, "GiB")
_RATIO = (0, 1, "")
_SECONDS = (1, 10**7, "seconds")
#: Numbers by setting: least, most, unit. The most tells a value in another unit, such
#: as bytes for GiB, from a large one.
RANGES: Mapping[str, tuple[float, float, str]] = {
    "chunk_size": (1, 1 << 24, "tokens"),
    "max_local_cpu_size": _GIB,
    "reserve_local_cpu_size": _GIB,
    "max_local_disk_size": (0, 1 << 20, "GiB"),
    "lazy_memory_initial_ratio": _RATIO,
    "lazy_memory_expand_trigger_ratio": _RATIO,
    "lazy_memory_step_ratio": _RATIO,
    "lookup_timeout_ms": (1, 10**7, "ms"),
    "blocking_timeout_secs": _SECONDS,
    "pin_timeout_sec": _SECONDS,
    "pin_check_interval_sec": _SECONDS,
    "internal_api_server_port_start": (1, 65535, ""),
}
#: Words by setting. LMCache hashes with Python's ``hash`` for one that it does not
#: know, and of the others says only when it first needs them which ones it takes.
WORDS: Mapping[str, tuple[str, ...]] = {
    "numa_mode": ("auto", "manual"),
    "remote_serde": ("naive", "kivi", "cachegen"),
    "pre_caching_hash_algorithm": (
        "builtin",
        "sha256",
        "sha256_cbor",
        "sha256_cbor_64bit",
        "xxhash",
        "xxhash_cbor",
    ),
}
#: What does not work on RBLN, and why it is refused, not ignored.
OFF: Mapping[str, str] = {
    "use_layerwise": "layer-wise transfer",
    "enable_blending": "blending",
    "use_gpu_connector_v3": "LMCache's GPU connector v3",
    "enable_scheduler_bypass_lookup": "a scheduler that looks up without the workers, "
    "which hold the chunks,",
    "enable_pd": "prefill/decode disaggregation (NIXL)",
    "enable_p2p": "peer-to-peer sharing (NIXL)",
    "gds_path": "GPU direct storage",
    "maru_path": "Maru",
    "external_lookup_client": "an external lookup client, whose keys hold no tenant,",
    "min_retrieve_tokens": "a least number of tokens to load, which ends the engine "
    "when a preempted request resumes,",
}
#: Entries of the extra config that do not; LMCache takes any text for true.
EXTRA_OFF: Mapping[str, str] = {
    "save_only_first_rank": "keeping chunks of the first rank only, where every rank "
    "keeps its own,",
    "enable_nixl_storage": "NIXL storage",
}
#: What a switch must be where LMCache takes any text for true.
UNQUOTED = "true or false, without quotes"
#: All its switches on our path.
EXTRA_SWITCHES = (
    *EXTRA_OFF,
    "audit_backend_enabled",
    "remote_enable_mla_worker_id_as0",
)
MAX_TOKENS = "lmcache.max_tokens_per_load"
#: Read from ``kv_connector_extra_config`` alone, and as they are: what they must be.
CONNECTOR_KEYS: Mapping[str, type[int]] = {
    MAX_TOKENS: int,
    "skip_last_n_tokens": int,
    "discard_partial_chunks": bool,
}
#: Variables on our path beside the settings.
VARIABLES = (
    *("config_file", "device_backend", "force_skip_save"),
    *("rbln_kv_layout", "rbln_staging_mib", "rbln_transpose_threads"),
)
# How settings begin that have no effect without what is off on RBLN.
_OFF_FAMILIES = ("pd_", "p2p_", "nixl_", "gds_", "maru_", "blend_")
_KINDS = {
    bool: "true or false; LMCache reads anything else as false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "a JSON object",
    list[int]: "whole numbers, separated by commas",
    list[float]: "numbers, separated by commas",
    list[str]: "texts, separated by commas",
}


def definitions() -> Mapping[str, dict[str, Any]]:
    """Return LMCache's definition of each of its settings."""
    # First Party
    from lmcache.v1.config import LMCacheEngineConfig

    found: Mapping[str, dict[str, Any]] = LMCacheEngineConfig._config_definitions
    return found


@cache
def aliases() -> Mapping[str, str]:
    """Return the older names that LMCache still takes for a setting's."""
    # First Party
    from lmcache.v1.config import _CONFIG_ALIASES, _DEPRECATED_CONFIGS

    # It knows more of them, and ignores those.
    return {o: new for o, new in _CONFIG_ALIASES.items() if o in _DEPRECATED_CONFIGS}


def effective() -> list[str]:
    """Return the names of all settings that have an effect on RBLN."""
    settings = [
        name
        for name in definitions()
        if name not in OFF and not name.startswith(_OFF_FAMILIES)
    ]
    return [*settings, MAX_TOKENS.removeprefix("lmcache.")]


def is_part_of_lmcache(name: str) -> bool:
    """Return whether LMCache's configuration has something else by a name.

    Such a key of ``kv_connector_extra_config`` replaces a method or a record.
    """
    # First Party
    from lmcache.v1.config import LMCacheEngineConfig

    return name.startswith("_") or hasattr(LMCacheEngineConfig, name)


@cache
def _known_variables() -> frozenset[str]:
    """Return every ``LMCACHE_*`` name in LMCache's sources."""
    spec = importlib.util.find_spec("lmcache")
    found: set[str] = set()
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in Path(folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8", errors="replace")
            found.update(re.findall(r"LMCACHE_[A-Z0-9_]+", text))
    return frozenset(found - {"LMCACHE_"})


def is_variable_of_lmcache(variable: str) -> bool:
    """Return whether a variable's name, or how it begins, is in LMCache's sources."""
    families = tuple(name for name in _known_variables() if name.endswith("_"))
    return variable in _known_variables() or variable.startswith(families)


def kind_of(name: str) -> Any:
    """Return the type of a setting's values, without ``None``."""
    kind = definitions()[name]["type"]
    choices = typing.get_args(kind)
    return choices[0] if type(None) in choices else kind


def read(name: str, value: Any) -> tuple[Any, str]:
    """Read a value as LMCache does.

    Args:
        name: A setting of LMCache's.
        value: What stands for it; a variable's text without its quotes.

    Returns:
        The value as LMCache has it then, and what it should have been; that is empty
        if it is right.
    """
    definition, kind = definitions()[name], kind_of(name)
    default, limits = definition["default"], RANGES.get(name)
    wanted = _KINDS.get(kind, "a value that LMCache can read")
    if limits:
        wanted += f" from {limits[0]} to {limits[1]} {limits[2]}".rstrip()
    if name in WORDS:
        wanted = " or ".join(WORDS[name])
    if value is None:
        optional = default is None or type(None) in typing.get_args(definition["type"])
        return (None, "") if optional else (default, wanted)
    try:
        converted = definition["env_converter"](value)
        is_well = not _is_misread(kind, value, converted, default)
    except json.JSONDecodeError as error:
        # Its text may hold secrets; where it breaks does not.
        place = f"line {error.lineno} column {error.colno}"
        return default, f"{wanted}; {error.msg} at {place}"
    except Exception:
        return default, wanted
    if converted is not None:
        is_well &= not limits or limits[0] <= converted <= limits[1]
        is_well &= name not in WORDS or converted in WORDS[name]
        # LMCache takes an empty text for a value here.
        is_well &= (name, converted) != ("remote_url", "")
    return (converted, "") if is_well else (default, wanted)


def says_nothing(name: str, text: str) -> bool:
    """Return whether LMCache goes on as without a variable, unable to convert it."""
    if text.strip().lower() not in ("", "none", "null") or kind_of(name) is str:
        return False
    return definitions()[name]["default"] is None and bool(read(name, text)[1])


def _is_misread(kind: Any, value: Any, converted: Any, default: Any) -> bool:
    """Return whether LMCache makes something else of a value without an error."""
    if kind is bool:
        return read_switch(value) is None
    if kind is str:
        return isinstance(value, bool | dict | list)
    if kind is dict:
        return not isinstance(converted, dict | None)
    if isinstance(converted, float) and not math.isfinite(converted):
        return converted != default
    if isinstance(value, str):
        return False
    given = value if isinstance(value, list) or kind in (int, float) else [value]
    return isinstance(value, bool) or bool(converted != given)


def show_setting(name: str, value: Any) -> str:
    """Return a setting's value as it may be printed."""
    kind = "name" if name.endswith("storage_plugins") else ""
    if kind_of(name) in (bool, int, float, list[int], list[float]):
        kind = "number"
    return show(value, WORDS.get(name, ()), kind)
