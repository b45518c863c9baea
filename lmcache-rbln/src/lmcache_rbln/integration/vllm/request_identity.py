# SPDX-License-Identifier: Apache-2.0
"""Whose KV a request may share, and what of a client's parameters LMCache gets.

vLLM keeps requests of different cache salts and LoRA adapters apart in its own prefix
cache. LMCache's keys know neither; they know tags. What a client sends reaches LMCache
unchecked, where a value of another type ends the engine. So LMCache gets one tag, made
here of everything that tells requests apart, and nothing that the client wrote.

Multimodal items need no tag: LMCache puts their hashes in place of their tokens.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
import hashlib
import json

#: LMCache's request configuration under which the identity becomes part of every key.
IDENTITY_TAG = "lmcache.tag.rbln_identity"
SKIP_SAVE = "lmcache.skip_save"
_CLIENT_TAG = "lmcache.tag."
_DIGEST_BYTES = 16
#: What a client sent is quoted in the log up to this many entries and characters.
_QUOTED_ENTRIES = 8
_QUOTED_LENGTH = 40


class NotCacheableError(ValueError):
    """A request that LMCache must not see; the message says why."""


@dataclass(frozen=True)
class CacheTerms:
    """On which terms LMCache caches a request.

    Attributes:
        identity: Requests share KV if this is equal; empty for those that vLLM itself
            would let share with everybody.
        skip_save: Whether nothing of the request is stored.
        warnings: What of the client's parameters is not followed.
    """

    identity: str = ""
    skip_save: bool = False
    warnings: tuple[str, ...] = ()

    def lookup_configs(self) -> dict[str, str]:
        """LMCache's request configuration for a lookup; strings only.

        LMCache's asynchronous lookup server drops a message with anything else, and
        the request would wait for its timeout.
        """
        return {IDENTITY_TAG: self.identity} if self.identity else {}

    def configs(self) -> dict[str, Any]:
        """LMCache's request configuration for loads and stores."""
        skip: dict[str, Any] = {SKIP_SAVE: True} if self.skip_save else {}
        return {**self.lookup_configs(), **skip}


def terms_of(request: Any) -> CacheTerms:
    """Return on which terms LMCache may cache a request.

    Args:
        request: vLLM's request; only read.

    Raises:
        NotCacheableError: Its KV is not determined by tokens and an identity, or it
            needs its whole prompt computed.
    """
    # Read without a default: an identity that vLLM renames must not be overlooked.
    if request.prompt_embeds is not None:
        raise NotCacheableError("its prompt is embeddings, which LMCache can't key")
    if request.skip_reading_prefix_cache:
        # Prompt log-probabilities would be missing for loaded tokens.
        raise NotCacheableError("it needs its whole prompt computed")
    tags, skip_save, warnings = _read(request.kv_transfer_params)
    adapter = _adapter(request.lora_request)
    identity = _identity(request.cache_salt, adapter, tags)
    return CacheTerms(identity, skip_save, tuple(warnings))


def _read(params: object) -> tuple[dict[str, Any], bool, list[str]]:
    """Take tags and ``skip_save`` out of what a client sent, and note the rest."""
    tags: dict[str, Any] = {}
    skip_save = False
    warnings: list[str] = []
    ignored: list[str] = []
    if params is None:
        return tags, skip_save, warnings
    if not isinstance(params, Mapping):
        warnings.append(
            f"kv_transfer_params ignored: wanted an object, got {_quoted(params)}"
        )
        return tags, skip_save, warnings
    for name, value in params.items():
        if isinstance(name, str) and name.startswith(_CLIENT_TAG):
            tags[name] = value
        elif name == SKIP_SAVE:
            # What can't be understood is not stored: the client may have meant that.
            skip_save = value is not False
            if not isinstance(value, bool):
                warnings.append(
                    f"{SKIP_SAVE} taken as true: wanted true or false, got "
                    f"{_quoted(value)}"
                )
        else:
            ignored.append(_quoted(name))
    if ignored:
        shown = ", ".join(ignored[:_QUOTED_ENTRIES])
        more = len(ignored) - _QUOTED_ENTRIES
        warnings.append(
            f"kv_transfer_params ignored: {shown}{f' and {more} more' * (more > 0)}; "
            f"wanted {SKIP_SAVE} or {_CLIENT_TAG}NAME"
        )
    return tags, skip_save, warnings


def _adapter(lora_request: Any) -> list[Any] | None:
    """What tells LoRA adapters apart, also after a restart with another one."""
    if lora_request is None:
        return None
    return [lora_request.lora_name, lora_request.lora_path]


def _identity(salt: Any, adapter: list[Any] | None, tags: dict[str, Any]) -> str:
    if salt is None and adapter is None and not tags:
        return ""
    try:
        # JSON keeps 1, true and "1" apart, and where one part ends and the next begins.
        whole = json.dumps([salt, adapter, tags], sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise NotCacheableError(
            f"its cache_salt, adapter or tags are no JSON values ({error})"
        ) from error
    return hashlib.blake2b(whole.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _quoted(value: object) -> str:
    if not isinstance(value, (str, int, float, bool, type(None))):
        return type(value).__name__
    try:
        text = repr(value)
    except ValueError:  # an int with more digits than Python prints
        return type(value).__name__
    return text if len(text) <= _QUOTED_LENGTH else f"{text[:_QUOTED_LENGTH]}..."
