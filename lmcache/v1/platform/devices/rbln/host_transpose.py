# SPDX-License-Identifier: Apache-2.0
"""The head <-> token transposition on the host, by torch, and its setting.

``lmcache.kv_transpose`` transposes a whole part of staging at once. torch needs a call
per tile and takes several times as long; it is the fallback where the extension can't
be imported.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Sequence
from functools import lru_cache
import os

# Third Party
import numpy as np
import torch

#: Threads of one transfer that transpose, the calling one included.
THREADS_ENV_VAR = "LMCACHE_RBLN_TRANSPOSE_THREADS"
#: More than this hardly helps: a few cores use all of the memory's bandwidth.
MAX_DEFAULT_THREADS = 4

#: More threads than any machine has memory bandwidth for.
MAX_THREADS = 64

#: Integer types of the same width, so that torch moves bits and not numbers.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Element widths, in bytes, that transfers can move.
ELEMENT_BYTES = tuple(_BITS)


@lru_cache(maxsize=1)
def transpose_threads() -> int:
    """Return how many threads transpose one transfer.

    Returns:
        The setting ``LMCACHE_RBLN_TRANSPOSE_THREADS``; by default one less than the
        CPUs that this process may use, so that copies keep one, but 1 to 4.

    Raises:
        ValueError: If the setting is not a whole number of 1 to 64.
    """
    raw = os.environ.get(THREADS_ENV_VAR, "").strip()
    if not raw:
        spare = len(os.sched_getaffinity(os.getpid())) - 1
        return max(1, min(MAX_DEFAULT_THREADS, spare))
    if not raw.isascii() or not raw.isdigit() or not 1 <= int(raw) <= MAX_THREADS:
        raise ValueError(
            f"{THREADS_ENV_VAR}={raw!r} is not a whole number of 1 to "
            f"{MAX_THREADS}; set for example {THREADS_ENV_VAR}=2"
        )
    return int(raw)


def copy_bits(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy host memory bit by bit, whatever the element type.

    Args:
        destination: Any strides, of the same shape and dtype.
        source: What to copy.
    """
    bits = _BITS[source.element_size()]
    destination.view(bits).copy_(source.view(bits))


class TorchTransposition:
    """Moves tiles between staging and the chunks of one transfer, one by one.

    Args:
        chunk_views: Chunks as ``[P, L, T, NH, HS]``, all of the same heads and dtype.
    """

    def __init__(self, chunk_views: Sequence[torch.Tensor]) -> None:
        self._chunks = chunk_views

    def gather(self, staging: torch.Tensor, tiles: np.ndarray) -> None:
        """Copy tiles from staging into the chunks.

        Args:
            staging: uint8, dense, in host memory.
            tiles: int64 ``[n, 10]``, columns as ``native.TILE_COLUMNS``.
        """
        for tile in tiles.tolist():
            staged, window = self._sides(staging, tile)
            copy_bits(window, staged)

    def scatter(self, staging: torch.Tensor, tiles: np.ndarray) -> None:
        """Copy tiles from the chunks into staging; arguments as :meth:`gather`."""
        for tile in tiles.tolist():
            staged, window = self._sides(staging, tile)
            copy_bits(staged, window)

    def _sides(
        self, staging: torch.Tensor, tile: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a tile in staging and in its chunk, in the same order of axes."""
        start, index, layer, plane, planes, token, blocks, slots, head, heads = tile
        chunk = self._chunks[index]
        shape = (blocks, planes, heads, slots, chunk.shape[4])
        size = chunk.element_size() * torch.Size(shape).numel()
        staged = staging[start : start + size].view(chunk.dtype).view(shape)
        window = chunk[
            plane : plane + planes,
            layer,
            token : token + blocks * slots,
            head : head + heads,
        ]
        return staged, window.unflatten(1, (blocks, slots)).permute(1, 0, 3, 2, 4)
