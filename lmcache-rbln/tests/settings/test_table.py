# SPDX-License-Identifier: Apache-2.0
"""The table against LMCache: what it refuses, LMCache misreads or breaks on."""

# Standard
from typing import Any

# Third Party
import pytest

# First Party
from lmcache.v1.config import LMCacheEngineConfig, _CONFIG_ALIASES
from lmcache_rbln.settings import table
from lmcache_rbln._lmcache import in_process


def test_the_table_names_settings_of_lmcache() -> None:
    names = {*table.RANGES, *table.WORDS, *table.OFF}
    assert names <= set(table.definitions())
    for name, (low, high, _) in table.RANGES.items():
        assert low <= table.definitions()[name]["default"] <= high, name
    for name, words in table.WORDS.items():
        assert table.definitions()[name]["default"] in (*words, None), name
    for name in table.OFF:
        assert not table.definitions()[name]["default"], name


def test_lmcaches_own_defaults_are_accepted() -> None:
    for name, definition in table.definitions().items():
        assert table.read(name, definition["default"]) == (definition["default"], "")


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("local_cpu", "yes", True),
        ("local_cpu", 1.0, True),
        ("save_unfull_chunk", "on", True),
        ("chunk_size", 256.9, 256.9),
        ("chunk_size", "abc", "abc"),
        ("chunk_size", None, 256),
        ("max_local_cpu_size", "5GB", 5.0),
        ("extra_config", "{'a': 1}", {"a": 1}),
        ("lookup_server_worker_ids", [1.5], [1.5]),
    ],
)
def test_values_that_lmcache_misreads_without_an_error(
    name: str, value: Any, meant: Any
) -> None:
    assert table.read(name, value)[1]
    # As LMCache reads variables and files.
    config = LMCacheEngineConfig.from_defaults(**{name: value})
    got = getattr(config, name)
    assert (type(got), got) != (type(meant), meant)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chunk_size", [1]),
        ("max_local_cpu_size", {"a": 1}),
        ("storage_plugins", 5),
        ("extra_config", 5),
        ("max_local_cpu_size", 10**400),
    ],
)
def test_values_that_end_lmcache_with_an_error_that_names_nothing(
    name: str, value: Any
) -> None:
    assert table.read(name, value)[1]
    with pytest.raises((TypeError, AttributeError, OverflowError)) as error:
        LMCacheEngineConfig.from_defaults(**{name: value})
    assert name not in str(error.value)


def test_a_hash_that_lmcache_replaces_by_pythons() -> None:
    assert table.read("pre_caching_hash_algorithm", "sha265")[1]
    for word, hashes in (("sha265", hash), ("builtin", hash), ("sha256_cbor", None)):
        made = in_process("v1.token_database").ChunkedTokenDatabase(
            LMCacheEngineConfig.from_defaults(pre_caching_hash_algorithm=word)
        )
        assert (made.hash_func is hash) == (hashes is hash)


@pytest.mark.parametrize("name", sorted(table.RANGES))
def test_ranges(name: str) -> None:
    low, high, unit = table.RANGES[name]
    for value in (low, high):
        assert table.read(name, value) == (value, "")
    for value in (low - 1, high + 1):
        wanted = table.read(name, value)[1]
        assert f"from {low} to {high} {unit}".strip() in wanted


def test_older_names_are_those_that_lmcache_still_reads() -> None:
    for old, new in _CONFIG_ALIASES.items():
        definition = table.definitions()[new]
        kind = definition["type"]
        value: Any = True if kind is bool else ["a"] if "str]" in str(kind) else 7
        config = LMCacheEngineConfig.from_dict({old: value})
        is_read = getattr(config, new) != definition["default"]
        assert is_read == (old in table.aliases()), old


def test_only_what_works_here_is_proposed_for_a_misspelt_name() -> None:
    names = set(table.effective())
    assert {"chunk_size", "local_cpu", "remote_url", "max_tokens_per_load"} <= names
    assert not names & set(table.OFF)


def test_only_numbers_and_switches_are_shown_as_such() -> None:
    for name, definition in table.definitions().items():
        shown = table.show_setting(name, "hunter")
        is_plain = isinstance(definition["default"], bool | int | float)
        assert (shown == "'hunter'") or not is_plain, name
    assert table.show_setting("extra_config", "hunter") == "***"
    assert table.show_setting("remote_url", "hunter") == "***"


def test_what_would_replace_a_part_of_lmcache() -> None:
    assert all(map(table.is_part_of_lmcache, ("validate", "to_dict", "_user_set_keys")))
    assert not any(map(table.is_part_of_lmcache, ("chunk_sizes", "config_file", "")))
