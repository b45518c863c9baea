# SPDX-License-Identifier: Apache-2.0
"""The table against LMCache: what it refuses, LMCache misreads or breaks on."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

# Third Party
import pytest

# First Party
from lmcache.v1.config import LMCacheEngineConfig
from lmcache_rbln.settings import table


def test_the_table_names_settings_of_lmcache() -> None:
    names = {*table.RANGES, *table.WORDS, *table.OFF}
    assert names <= set(table.definitions())
    for name, (low, high, _) in table.RANGES.items():
        default = table.default_of(name)
        assert default is None or low <= default <= high, name
    for name, words in table.WORDS.items():
        assert table.default_of(name) in (*words, None), name
    for name in table.OFF:
        assert not table.default_of(name), name


def test_lmcaches_own_defaults_are_accepted() -> None:
    for name, definition in table.definitions().items():
        default = definition["default"]
        assert table.read(name, default).wanted == "", name


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("local_cpu", "yes", True),
        ("local_cpu", 1.0, True),
        ("save_unfull_chunk", "on", True),
        ("chunk_size", 256.9, 256.9),
        ("chunk_size", True, True),
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
    assert table.read(name, value).wanted
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
    assert table.read(name, value).wanted
    with pytest.raises((TypeError, AttributeError, OverflowError)) as error:
        LMCacheEngineConfig.from_defaults(**{name: value})
    assert name not in str(error.value)


def _policy(value: str) -> None:
    # First Party
    from lmcache.v1.storage_backend.cache_policy import get_cache_policy

    get_cache_policy(value)


def _numa(value: str) -> None:
    # First Party
    from lmcache.v1.system_detection import NUMADetector

    NUMADetector.get_numa_mapping(SimpleNamespace(numa_mode=value, extra_config=None))


def _serde(value: str) -> None:
    # First Party
    from lmcache.v1.storage_backend.naive_serde import CreateSerde

    metadata: Any = SimpleNamespace()
    CreateSerde(value, metadata, LMCacheEngineConfig.from_defaults())


@pytest.mark.parametrize(
    ("name", "use", "value"),
    [
        ("cache_policy", _policy, "LEAST"),
        ("cache_policy", _policy, ""),
        ("numa_mode", _numa, "Auto"),
        ("numa_mode", _numa, "None"),
        ("remote_serde", _serde, "Naive"),
    ],
)
def test_words_that_lmcache_breaks_on_later(
    name: str, use: Callable[[str], None], value: str
) -> None:
    assert table.read(name, value).wanted == " or ".join(table.WORDS[name])
    with pytest.raises((ValueError, AssertionError, UnboundLocalError)):
        use(value)
    if name in ("cache_policy",):
        for word in table.WORDS[name]:
            use(word.lower())


def test_an_empty_path_for_gds_is_one_that_lmcache_breaks_on() -> None:
    # First Party
    from lmcache.v1.storage_backend.path_sharder import PathSharder

    assert not table.is_unset("gds_path", "")
    assert LMCacheEngineConfig.from_defaults(gds_path="").gds_path is not None
    with pytest.raises(ValueError, match="path"):
        PathSharder("", "by_gpu", "cuda")


def test_a_hash_that_lmcache_replaces_by_pythons() -> None:
    # First Party
    from lmcache_rbln._lmcache import in_process

    assert table.read("pre_caching_hash_algorithm", "sha265").wanted
    for word, hashes in (("sha265", hash), ("builtin", hash), ("sha256_cbor", None)):
        made = in_process("v1.token_database").ChunkedTokenDatabase(
            LMCacheEngineConfig.from_defaults(pre_caching_hash_algorithm=word)
        )
        assert (made.hash_func is hash) == (hashes is hash)


@pytest.mark.parametrize("name", sorted(table.RANGES))
def test_ranges(name: str) -> None:
    low, high, unit = table.RANGES[name]
    for value in (low, high):
        assert table.out_of_range(name, value) == ""
    for value in (low - 1, high + 1):
        wanted = table.out_of_range(name, value)
        assert f"from {low} to {high} {unit}".strip() in wanted


def test_older_names_are_those_that_lmcache_still_reads() -> None:
    # First Party
    from lmcache.v1.config import _CONFIG_ALIASES

    for old, new in _CONFIG_ALIASES.items():
        kind = table.definitions()[new]["type"]
        value: Any = True if kind is bool else ["a"] if "str]" in str(kind) else 7
        config = LMCacheEngineConfig.from_dict({old: value})
        is_read = getattr(config, new) != table.default_of(new)
        assert is_read == (old in table.aliases()), old
