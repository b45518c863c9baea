# SPDX-License-Identifier: Apache-2.0
"""What vLLM keeps apart is apart in the server's keys, and what it shares is shared."""

# Future
from __future__ import annotations

# Standard
from types import SimpleNamespace
from typing import Any
import itertools

# Third Party
import pytest
import torch

# First Party
from lmcache.integration.vllm.request_salt import MADE, request_salt
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

TOKENS = list(range(64))


def request(**identity: Any) -> Any:
    """A request as LMCache reads it; the same tokens in all of them."""
    plain = {
        "request_id": "a request",
        "cache_salt": None,
        "lora_request": None,
        "prompt_embeds": None,
        "mm_features": [],
        "sampling_params": None,
        "all_token_ids": TOKENS,
        "prompt_token_ids": TOKENS,
        "num_prompt_tokens": len(TOKENS),
    }
    return SimpleNamespace(**plain | identity)


def adapter(name: str, path: str = "/adapters/x", number: int = 1) -> Any:
    return SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=number)


def picture(identifier: str) -> Any:
    place = SimpleNamespace(offset=8, length=16)
    return SimpleNamespace(identifier=identifier, mm_position=place)


#: Pairwise different for vLLM.
APART: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a salt": {"cache_salt": "tenant-A"},
    "another salt": {"cache_salt": "tenant-B"},
    "an adapter": {"lora_request": adapter("x")},
    "another adapter": {"lora_request": adapter("y")},
    "an adapter of other weights": {"lora_request": adapter("x", "/adapters/x2")},
    "an adapter and a salt": {"lora_request": adapter("x"), "cache_salt": "tenant-A"},
    "a salt like an adapter's": {
        "cache_salt": request_salt(request(lora_request=adapter("x")))
    },
    "a salt with a slash": {"cache_salt": "a/b"},
    "a salt with another": {"cache_salt": "a@b"},
    "a long salt": {"cache_salt": "s" * 129},
    "a longer salt": {"cache_salt": "s" * 130},
    "embeddings": {"prompt_embeds": torch.ones(64, 4)},
    "other embeddings": {"prompt_embeds": torch.zeros(64, 4)},
    "embeddings of another type": {"prompt_embeds": torch.zeros(64, 4).bfloat16()},
    "embeddings and a salt": {
        "prompt_embeds": torch.ones(64, 4),
        "cache_salt": "tenant-A",
    },
    "a picture": {"mm_features": [picture("1" * 64)]},
    "another picture": {"mm_features": [picture("2" * 64)]},
}


def key(identity: dict[str, Any]) -> IPCCacheServerKey:
    """The key that LMCache's scheduler asks the server for."""
    metadata = pytest.importorskip("lmcache.integration.vllm.lmcache_mp_metadata")
    tracker = metadata.LMCacheMPRequestTracker(request(**identity))
    return IPCCacheServerKey.from_token_ids(
        "model", 1, None, tracker.get_token_ids(), cache_salt=tracker.cache_salt
    )


@pytest.mark.parametrize(
    ("one", "other"), itertools.combinations(APART, 2), ids=lambda name: name
)
def test_apart(one: str, other: str) -> None:
    assert key(APART[one]) != key(APART[other])


@pytest.mark.parametrize("identity", APART)
def test_shared_with_its_like(identity: str) -> None:
    assert key(APART[identity]) == key(APART[identity])


def test_an_adapter_s_number_is_not_part_of_it() -> None:
    """vLLM counts adapters anew after a restart."""
    first, then = (
        key({"lora_request": adapter("x", number=number)}) for number in (1, 7)
    )
    assert first == then


@pytest.mark.parametrize("salt", [None, "", "tenant-A", "s" * 128])
def test_keys_of_plain_requests_are_those_of_an_unchanged_lmcache(
    salt: str | None,
) -> None:
    assert request_salt(request(cache_salt=salt)) == (salt or "")


def test_made_salts_are_accepted_and_belong_to_nobody() -> None:
    made = request_salt(request(lora_request=adapter("x")))
    assert made.startswith(MADE)
    IPCCacheServerKey.from_token_ids("model", 1, None, TOKENS, cache_salt=made)
    assert request_salt(request(cache_salt=made)) != made
