# SPDX-License-Identifier: Apache-2.0
"""Aligned host tensors (host side of KV transfer)."""

import torch

from ._unsupported import missing_attribute

__all__ = ["aligned_tensor"]

_ALIGNMENT = 4096


def aligned_tensor(numel: int) -> torch.Tensor:
    """Allocate a host tensor that starts on a page.

    Args:
        numel: Number of float16 elements.

    Returns:
        A 1-D float16 CPU tensor with unspecified values.
    """
    nbytes = numel * torch.float16.itemsize
    raw = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % _ALIGNMENT
    return raw[start : start + nbytes].view(torch.float16)


__getattr__ = missing_attribute("rebel.kv_cache")
