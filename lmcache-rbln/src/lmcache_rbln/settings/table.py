# SPDX-License-Identifier: Apache-2.0
"""What LMCache's settings may be: LMCache's own types, and what they leave open.

LMCache reads a malformed switch as off, rounds a number down without a word, and goes
on with ``None`` for what it can't convert.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
import json
import math
import typing

# Local
from .masking import show

_GIB = (0, 1 << 16, "GiB")
_SECONDS = (1, 10**7, "seconds")
_RATIO = (0, 1, "")
#: Numbers by setting: least, most, unit. The most tells a value in another unit, such
#: as bytes for GiB, from a large one.
RANGES: Mapping[str, tuple[float, float, str]] = {
    "chunk_size": (1, 1 << 24, "tokens"),
    "max_local_cpu_size": _GIB,
    "reserve_local_cpu_size": _GIB,
    "max_local_disk_size": (0, 1 << 20, "GiB"),
    "max_hidden_state_cpu_size": _GIB,
    "lazy_memory_safe_size": _GIB,
    "lazy_memory_initial_ratio": _RATIO,
    "lazy_memory_expand_trigger_ratio": _RATIO,
    "lazy_memory_step_ratio": _RATIO,
    "hit_miss_ratio": _RATIO,
    "lookup_timeout_ms": (1, 10**7, "ms"),
    "blocking_timeout_secs": _SECONDS,
    "pin_timeout_sec": _SECONDS,
    "pin_check_interval_sec": _SECONDS,
    "internal_api_server_port_start": (1, 65535, ""),
    "mp_port": (1, 65535, ""),
}
#: Words by setting, in any case. LMCache takes another word for its default, or breaks
#: when it first needs the setting.
WORDS: Mapping[str, Sequence[str]] = {
    "cache_policy": ("LRU", "LFU", "FIFO", "MRU"),
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
    "chunk_statistics_strategy": ("memory_bloom_filter", "file_hash"),
    "hidden_states_retrieve_mode": ("prefix_strict", "skip_missing_chunks"),
}
# Words of which LMCache compares the spelling.
_EXACT = ("numa_mode", "remote_serde", "pre_caching_hash_algorithm")
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
#: Entries of the extra config that are read on our path: what they may be.
EXTRA_SWITCHES = (
    "save_only_first_rank",
    "remote_enable_mla_worker_id_as0",
    "enable_nixl_storage",
    "audit_backend_enabled",
)
#: Entries of the extra config that LMCache can't work with on RBLN when they are on.
EXTRA_OFF: Mapping[str, str] = {
    "save_only_first_rank": "keeping chunks of the first rank only, where every rank "
    "keeps its own,",
    "enable_nixl_storage": "NIXL storage",
}
#: Read from ``kv_connector_extra_config`` alone, beside the settings: least, most.
CONNECTOR_NUMBERS: Mapping[str, tuple[int, int, str]] = {
    "lmcache.max_tokens_per_load": (0, 1 << 31, "tokens"),
    "skip_last_n_tokens": (0, 1 << 31, "tokens"),
}
CONNECTOR_SWITCHES = ("discard_partial_chunks",)
# A setting for which LMCache takes an empty text for a value.
_NOT_EMPTY = ("remote_url",)
# Words by which people say that there is no value.
_NOTHING = ("", "none", "null")
_BOOLEANS = ("true", "false", "1", "0")
_SWITCH = "true or false; LMCache reads anything else as false"


@dataclass(frozen=True)
class Reading:
    """What LMCache makes of a value.

    Attributes:
        value: The value as LMCache has it then.
        wanted: What it should have been; empty if it is right.
    """

    value: Any = None
    wanted: str = ""


def definitions() -> Mapping[str, dict[str, Any]]:
    """Return LMCache's definition of each of its settings."""
    # First Party
    from lmcache.v1.config import LMCacheEngineConfig

    found: Mapping[str, dict[str, Any]] = LMCacheEngineConfig._config_definitions
    return found


def is_unset(name: str, text: str) -> bool:
    """Return whether LMCache goes on as without a variable that says nothing.

    It does where it can't convert the text; of one that it can, it takes the words.

    Args:
        name: A setting of LMCache's.
        text: The text of its variable.
    """
    definition = definitions()[name]
    if text.strip().casefold() not in _NOTHING or definition["default"] is not None:
        return False
    try:
        definition["env_converter"](text)
    except ValueError:
        return True
    return False


def default_of(name: str) -> Any:
    """Return LMCache's default of a setting; None if it has none."""
    if name in CONNECTOR_NUMBERS:
        return CONNECTOR_NUMBERS[name][0]
    return definitions().get(name, {}).get("default")


def aliases() -> Mapping[str, str]:
    """Return the older names that LMCache still takes for a setting's."""
    # First Party
    from lmcache.v1 import config

    # It knows more of them, and ignores those.
    deprecated = getattr(config, "_DEPRECATED_CONFIGS", {})
    return {
        old: new
        for old, new in getattr(config, "_CONFIG_ALIASES", {}).items()
        if old in deprecated
    }


def read(name: str, value: Any) -> Reading:
    """Read a value as LMCache does.

    Args:
        name: A setting of LMCache's.
        value: What stands for it; a variable's text without its quotes.
    """
    definition = definitions()[name]
    kind = _kind(definition)
    if value is None:
        return (
            Reading() if _may_be_none(definition) else Reading(None, kind or "a value")
        )
    if kind == _SWITCH:
        return read_switch(value)
    if kind == _OBJECT:
        return read_object(value)
    if not _is_like(kind, value):
        return Reading(None, _say(name, kind))
    try:
        converted = definition["env_converter"](value)
    except Exception:
        return Reading(None, _say(name, kind))
    infinite = isinstance(converted, float) and not math.isfinite(converted)
    if infinite and converted != definition["default"]:
        return Reading(None, f"a finite number{_range_text(RANGES.get(name))}")
    if name in _NOT_EMPTY and converted == "":
        return Reading(None, "a value, or no such setting at all")
    words = WORDS.get(name)
    if words and converted is not None:
        spelt = converted if name in _EXACT else str(converted).casefold()
        if spelt not in (words if name in _EXACT else [w.casefold() for w in words]):
            return Reading(None, " or ".join(words))
    return Reading(converted)


def read_switch(value: Any) -> Reading:
    """Read a switch as LMCache does, which knows four spellings."""
    word = str(value).strip().lower() if isinstance(value, bool | int | str) else ""
    if word not in _BOOLEANS:
        return Reading(None, _SWITCH)
    return Reading(word in ("true", "1"))


def read_object(value: Any) -> Reading:
    """Read an extra config: an object, or its JSON."""
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            # Its text may hold secrets; where it breaks does not.
            place = f"line {error.lineno} column {error.colno}"
            return Reading(None, f"{_OBJECT}; {error.msg} at {place}")
        except (ValueError, RecursionError):
            return Reading(None, f"{_OBJECT} that can be parsed")
    if value is None or value == "":
        return Reading()
    if not isinstance(value, dict):
        return Reading(None, _OBJECT)
    return Reading(value)


def read_number(value: Any, limits: tuple[float, float, str]) -> Reading:
    """Read a whole number that LMCache takes from vLLM's configuration as it is."""
    wanted = f"a whole number{_range_text(limits)}"
    if not _is_like(_WHOLE, value) or isinstance(value, str):
        return Reading(None, wanted)
    low, high, _ = limits
    return Reading(int(value)) if low <= value <= high else Reading(None, wanted)


def out_of_range(name: str, value: Any) -> str:
    """Return the range that a value is not in; empty if it is, or there is none."""
    limits = RANGES.get(name)
    if limits is None or not isinstance(value, int | float):
        return ""
    low, high, _ = limits
    return "" if low <= value <= high else _say(name, _kind(definitions()[name]))


def show_setting(name: str, value: Any) -> str:
    """Return a setting's value as it may be printed."""
    definition = definitions().get(name)
    if definition is None:
        return show(value, (), "number")
    kind = _kind(definition)
    words = (*WORDS.get(name, ()), *_NOTHING)
    if kind in (_SWITCH, _WHOLE, _NUMBER, _WHOLES, _NUMBERS):
        return show(value, words, "number")
    if name in ("local_disk", "runtime_plugin_locations"):
        return show(value, words, "path")
    if name in ("storage_plugins", "remote_storage_plugins"):
        return show(
            value if not isinstance(value, str) else value.split(","), (), "name"
        )
    return show(value, words)


_WHOLE, _NUMBER, _OBJECT, _TEXT = (
    "a whole number",
    "a number",
    "a JSON object",
    "a text",
)
_WHOLES, _NUMBERS, _TEXTS = (
    "whole numbers, separated by commas",
    "numbers, separated by commas",
    "texts, separated by commas",
)
_KINDS = {
    "int": _WHOLE,
    "float": _NUMBER,
    "str": _TEXT,
    "_parse_local_disk": _TEXT,
    "_to_bool": _SWITCH,
    "_to_int_list": _WHOLES,
    "_to_float_list": _NUMBERS,
    "_to_str_list": _TEXTS,
}


def _may_be_none(definition: Mapping[str, Any]) -> bool:
    optional = type(None) in typing.get_args(definition["type"])
    return optional or definition["default"] is None


def _kind(definition: Mapping[str, Any]) -> str:
    if "dict" in str(definition["type"]).lower():
        return _OBJECT
    if definition["type"] is bool:
        return _SWITCH
    return _KINDS.get(getattr(definition["env_converter"], "__name__", ""), "")


def _is_like(kind: str, value: Any) -> bool:
    """Return whether LMCache takes a value for what it is, and not for another."""
    if isinstance(value, list):
        one = {_WHOLES: _WHOLE, _NUMBERS: _NUMBER, _TEXTS: _TEXT, "": _TEXT}.get(kind)
        return one is not None and all(_is_like(one, entry) for entry in value)
    if isinstance(value, bool | dict):
        return False
    if kind in (_WHOLE, _WHOLES) and isinstance(value, float):
        return kind == _WHOLE and value.is_integer()
    if kind in (_NUMBERS, _WHOLE, _WHOLES, _NUMBER):
        return isinstance(value, int | float | str)
    if kind == _TEXTS:
        return isinstance(value, str)
    return isinstance(value, str | int | float)


def _say(name: str, kind: str) -> str:
    return f"{kind or 'a value that LMCache can read'}{_range_text(RANGES.get(name))}"


def _range_text(limits: tuple[float, float, str] | None) -> str:
    if limits is None:
        return ""
    low, high, unit = limits
    return f" from {low} to {high} {unit}".rstrip()
