# SPDX-License-Identifier: Apache-2.0
"""Who shares KV with whom, and what becomes of what a client sends."""

# Standard
from types import SimpleNamespace
from typing import Any
import json

# Third Party
from hypothesis import given
from hypothesis import strategies as st
import pytest

# First Party
from lmcache_rbln.integration.vllm.request_identity import (
    IDENTITY_TAG,
    NotCacheableError,
    terms_of,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)
#: Few letters, so that parts of one look like parts of another.
NAMES = st.text("ab@%|", max_size=3)
TAGS = st.dictionaries(NAMES.map("lmcache.tag.{}".format), JSON | NAMES, max_size=3)
ADAPTERS = st.none() | st.tuples(NAMES, NAMES)
PARTS = st.tuples(st.none() | NAMES, ADAPTERS, TAGS)


def request(
    salt: Any = None, adapter: Any = None, params: Any = None, **more: Any
) -> Any:
    lora = (
        SimpleNamespace(lora_name=adapter[0], lora_path=adapter[1]) if adapter else None
    )
    known = {
        "cache_salt": salt,
        "lora_request": lora,
        "kv_transfer_params": params,
        "prompt_embeds": None,
        "skip_reading_prefix_cache": False,
    }
    return SimpleNamespace(**(known | more))


def identity(*parts: Any) -> str:
    return terms_of(request(*parts)).identity


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same, 1 and true being two."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@given(PARTS, PARTS)
def test_equal_exactly_if_every_part_is(one: Any, other: Any) -> None:
    assert (identity(*one) == identity(*other)) == same(one, other)


@given(PARTS)
def test_a_key_holds_it_and_comes_back_whole(parts: Any) -> None:
    """From a backend's listing or a peer, whatever the salt is made of."""
    # Third Party
    import torch

    # First Party
    from lmcache.utils import CacheEngineKey

    terms = terms_of(request(*parts))
    key = CacheEngineKey("m", 1, 0, 7, torch.bfloat16, terms.configs())
    text = key.to_string()
    assert CacheEngineKey.from_string(text) == key
    assert CacheEngineKey.from_dict(key.to_dict()) == key
    # A file name on every file system.
    assert text.isascii() and text.count("@") <= 5 and len(text) < 100


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", ("b", "p")), ("ab", None)),
        (("a", None), (None, ("a", "a"))),
        (("", None), (None, None)),
        (("\u00e9", None), ("e\u0301", None)),
        (("\ud800", None), ("?", None)),
        # Another adapter under a name that was used before.
        ((None, ("sql", "/v1")), (None, ("sql", "/v2"))),
        (("t", None), (None, None, {"lmcache.tag.cache_salt": "t"})),
        ((None, None, {"lmcache.tag.u": 1}), (None, None, {"lmcache.tag.u": True})),
        ((None, None, {"lmcache.tag.u": 1}), (None, None, {"lmcache.tag.u": "1"})),
        ((None, None, {"lmcache.tag.u": 1}), (None, None, {"lmcache.tag.u": 1.0})),
        ((None, None, {"lmcache.tag.u": None}), (None, None, None)),
        (
            (None, None, {"lmcache.tag.a": "b@c%d"}),
            (None, None, {"lmcache.tag.a": "b"}),
        ),
    ],
)
def test_look_alikes(one: Any, other: Any) -> None:
    assert identity(*one) != identity(*other)


def test_nobody_can_imitate_another() -> None:
    """Our own tag, sent by a client, is a tag like any other."""
    victim = identity("tenant-A")
    params = {IDENTITY_TAG: victim}
    assert victim not in (identity(None, None, params), identity("", None, params))


def test_what_vllm_shares_is_shared() -> None:
    """Then keys are those of LMCache on every other device."""
    for params in (None, {}, {"lmcache.skip_save": False}):
        terms = terms_of(request(params=params))
        assert terms.identity == ""
        assert terms.configs() == {}
        assert not terms.warnings


def test_it_stays_the_same_after_a_restart() -> None:
    """Chunks on disk and on servers outlive the engine: this value never changes."""
    params = {"lmcache.tag.b": [1, {"x": None}], "lmcache.tag.a": "\u00fc"}
    got = terms_of(request("tenant-A", ("sql", "/adapters/sql"), params))
    assert got.identity == "402b012447ba8973d94ff0e6b18395c0"
    assert got.identity == identity(
        "tenant-A", ("sql", "/adapters/sql"), dict(reversed(params.items()))
    )


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, b"a", {"x": object()}, 10**5000, float],
    ids=["object", "set", "bytes", "nested", "huge", "type"],
)
def test_a_tag_that_is_no_value_keeps_the_request_out(value: Any) -> None:
    """Dropped it would share its KV with everybody."""
    with pytest.raises(NotCacheableError, match="no JSON values"):
        terms_of(request(params={"lmcache.tag.u": value}))


def test_a_tag_in_itself_keeps_the_request_out() -> None:
    deep: list[Any] = []
    deep.append(deep)
    with pytest.raises(NotCacheableError, match="no JSON values"):
        terms_of(request(params={"lmcache.tag.u": deep}))


@pytest.mark.parametrize("value", ["true", 1, 0, None, [], "false"])
def test_skip_save_that_is_not_clear_stores_nothing(value: Any) -> None:
    terms = terms_of(request(params={"lmcache.skip_save": value}))
    assert terms.skip_save
    [warning] = terms.warnings
    assert "wanted true or false" in warning


@pytest.mark.parametrize("value", [True, False])
def test_skip_save(value: bool) -> None:
    terms = terms_of(request(params={"lmcache.skip_save": value}))
    assert terms.skip_save is value
    assert terms.configs() == ({"lmcache.skip_save": True} if value else {})
    assert not terms.warnings
    # LMCache's lookup server takes strings only.
    assert terms.lookup_configs() == {}


@given(JSON | st.dictionaries(st.text() | st.integers(), JSON, max_size=20))
def test_nothing_else_gets_through(params: Any) -> None:
    terms = terms_of(request(params=params))
    assert set(terms.configs()) <= {IDENTITY_TAG, "lmcache.skip_save"}
    for warning in terms.warnings:
        assert warning.isprintable() and len(warning) < 700
    known = isinstance(params, dict) and all(
        isinstance(name, str) and name.startswith("lmcache.tag.") for name in params
    )
    assert bool(terms.warnings) == (params is not None and not known)


@pytest.mark.parametrize(
    "params",
    [
        {"disagg_spec": {}},
        {"ret_first_tok": 1},
        {"do_remote_prefill": True},
        {"lmcache.ttl\nFAKE": 1},
        ["lmcache.skip_save"],
        "ret_first_tok",
        5,
    ],
)
def test_what_is_not_followed_is_named_in_one_line(params: Any) -> None:
    [warning] = terms_of(request(params=params)).warnings
    assert "kv_transfer_params ignored" in warning
    assert "\n" not in warning


def test_embeddings_and_prompt_logprobs_stay_out() -> None:
    with pytest.raises(NotCacheableError, match="embeddings"):
        terms_of(request(prompt_embeds=object()))
    with pytest.raises(NotCacheableError, match="whole prompt"):
        terms_of(request(skip_reading_prefix_cache=True))
