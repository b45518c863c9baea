# SPDX-License-Identifier: Apache-2.0
"""Whose KV a request of vLLM may share, as the cache salt of LMCache's server.

vLLM keeps requests of different cache salts, LoRA adapters and prompt embeddings apart
in its own prefix cache. The server's keys have tokens and a salt and nothing else, so
everything else goes into the salt. Multimodal items are not part of it: LMCache puts
their hashes in place of their tokens.
"""

# Future
from __future__ import annotations

# Standard
from typing import Any
import hashlib
import json

# Third Party
import torch

# First Party
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

#: Starts every salt that is made here; no client's salt is used with this beginning.
MADE = "identity-"


def request_salt(request: Any) -> str:
    """Return the salt that tells a request's KV apart.

    Args:
        request: vLLM's request; only read.

    Returns:
        The client's ``cache_salt``, or the empty string, where nothing else counts and
        LMCache accepts it. Else a digest of it, the LoRA adapter (by name and path,
        since a name may get other weights) and the prompt embeddings.
    """
    salt = getattr(request, "cache_salt", None) or ""
    adapter = getattr(request, "lora_request", None)
    embeds = getattr(request, "prompt_embeds", None)
    if adapter is None and embeds is None and _is_plain(salt):
        return salt
    identity = [
        salt,
        None if adapter is None else [adapter.lora_name, adapter.lora_path],
        None if embeds is None else _digest(embeds),
    ]
    # JSON keeps None and the string apart, and where one part ends.
    whole = json.dumps(identity).encode()
    return MADE + hashlib.blake2b(whole, digest_size=32).hexdigest()


def _is_plain(salt: str) -> bool:
    """Return whether LMCache takes the salt as it is."""
    return (
        not salt.startswith(MADE)
        and len(salt) <= IPCCacheServerKey._SALT_MAX_LEN
        and not IPCCacheServerKey._SALT_FORBIDDEN_CHARS & set(salt)
    )


def _digest(embeds: torch.Tensor) -> str:
    """Hash shape, type and bytes of prompt embeddings."""
    data = embeds.detach().cpu().contiguous()
    digest = hashlib.blake2b(f"{tuple(data.shape)} {data.dtype}".encode())
    digest.update(data.view(torch.uint8).numpy().data)
    return digest.hexdigest()
