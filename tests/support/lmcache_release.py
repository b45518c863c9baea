# SPDX-License-Identifier: Apache-2.0
"""What LMCache 0.5.7 logs and hands over otherwise than 0.5.6."""

# Future
from __future__ import annotations

# Standard
from importlib import import_module
from importlib.util import find_spec
from typing import Any
import pickle

# Third Party
import torch

#: The chunks of a worker without shared memory are pickled; since 0.5.7 they are not.
_IS_INLINE = find_spec("lmcache.v1.multiprocess.token_codec") is not None
#: What the worker logs that it creates for them.
INLINE_CONTEXT = (
    "EngineDrivenContextInline" if _IS_INLINE else "EngineDrivenContextPickle"
)
#: What the server logs, by transport.
STRATEGIES = {
    "SHM": "Using shm non-GPU transfer strategy",
    "pickle": "Using pickle non-GPU transfer strategy",
}
if _IS_INLINE:
    STRATEGIES = {
        "SHM": "Using shm engine-driven transfer strategy",
        "pickle": "Using safe inline engine-driven transfer strategy",
    }


def _codec() -> Any:
    return import_module("lmcache.v1.multiprocess.token_codec")


def token_ids(load_or_store: Any) -> list[int]:
    """Return the tokens of an operation that the scheduler hands to the worker."""
    if not _IS_INLINE:
        return list(load_or_store.token_ids)
    return list(_codec().unpack_token_ids(load_or_store.token_bytes))


def as_handed_over(tokens: list[int]) -> Any:
    """Return tokens as the scheduler hands them to the worker."""
    return _codec().pack_token_ids(tokens) if _IS_INLINE else tokens


def _wire() -> Any:
    return import_module("lmcache.v1.multiprocess.transfer_context.tensor_wire")


def sent(chunks: list[torch.Tensor]) -> bytes:
    """Return chunks as the worker and the server send them to each other."""
    return _wire().encode_tensors(chunks) if _IS_INLINE else pickle.dumps(chunks)


def received(data: bytes, like: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return what was sent: ``count`` chunks with the shape and dtype of ``like``."""
    if not _IS_INLINE:
        return list(pickle.loads(data))
    return list(
        _wire().decode_tensors(
            data,
            expected_shape=like.shape,
            expected_dtype=like.dtype,
            expected_count=count,
        )
    )
