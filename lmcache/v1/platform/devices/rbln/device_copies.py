# SPDX-License-Identifier: Apache-2.0
"""Copies between paged blocks and host staging, as large and as few as possible.

Everything is issued on the current stream of the calling thread; nobody waits here.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Sequence
from functools import cached_property
from itertools import repeat
from typing import Protocol

# Third Party
import torch

# First Party
from lmcache.v1.platform.devices.rbln.kv_layout import KVGeometry
from lmcache.v1.platform.devices.rbln.kv_moves import Moves
from lmcache.v1.platform.devices.rbln.native import TILE_COLUMNS


class DeviceCopies(Protocol):
    """Copies the device regions of consecutive moves, one after the other."""

    def to_host(self, staged: torch.Tensor, batch: range) -> None:
        """Copy device regions to the host (D2H).

        Args:
            staged: Host staging of the batch's size, 1-D, in the cache's dtype.
            batch: Indices of consecutive moves.
        """

    def to_device(self, staged: torch.Tensor, batch: range) -> None:
        """Copy to device regions (H2D); arguments as :meth:`to_host`."""


class Regions:
    """The device regions of a transfer.

    Args:
        geometry: Geometry of the KV cache.
        layers: Its layers.
        moves: The transfer.

    Attributes:
        device: The device of the cache.
        dtype: Its element type.
    """

    def __init__(
        self, geometry: KVGeometry, layers: Sequence[torch.Tensor], moves: Moves
    ) -> None:
        self._layers = layers
        self._moves = moves
        self.device = geometry.device
        self.dtype = geometry.dtype

    @cached_property
    def _offsets(self) -> list[int]:
        return [int(layer.storage_offset()) for layer in self._layers]

    def of(self, batch: range) -> list[torch.Tensor]:
        """Return the regions of some moves, 1-D and contiguous."""
        layers, offsets, moves = self._layers, self._offsets, self._moves
        numbers = moves.layers[batch.start : batch.stop]
        starts = moves.starts[batch.start : batch.stop]
        places = [
            offsets[layer] + start for layer, start in zip(numbers, starts, strict=True)
        ]
        # Pieces are contiguous: each is one cheap view of its layer's memory.
        return list(
            map(
                torch.as_strided,
                [layers[layer] for layer in numbers],
                zip(self.sizes(batch), strict=True),
                repeat((1,)),
                places,
            )
        )

    @property
    def first(self) -> torch.Tensor:
        """The first region of the transfer."""
        return self.of(range(1))[0]

    def sizes(self, batch: range) -> list[int]:
        """Return how many elements each region has."""
        return self._moves.sizes[batch.start : batch.stop]


class DirectCopies:
    """A copy across the host link for each region.

    Args:
        regions: The device regions of the transfer.
        asynchronous: Whether staging is pinned and streams exist.
    """

    def __init__(self, regions: Regions, asynchronous: bool) -> None:
        self._regions = regions
        self._asynchronous = asynchronous

    def to_host(self, staged: torch.Tensor, batch: range) -> None:
        self._copy(staged, batch, True)

    def to_device(self, staged: torch.Tensor, batch: range) -> None:
        self._copy(staged, batch, False)

    def _copy(self, staged: torch.Tensor, batch: range, to_host: bool) -> None:
        windows = list(staged.split_with_sizes(self._regions.sizes(batch)))
        pair = (windows, self._regions.of(batch))
        targets, sources = pair if to_host else pair[::-1]
        torch._foreach_copy_(targets, sources, non_blocking=self._asynchronous)


class DeviceStagedCopies:
    """One copy across the host link for a whole batch, collected in device memory.

    Args:
        regions: The device regions of the transfer.
        buffer: Device memory of the cache's dtype, as large as a staging buffer. Only
            this transfer uses it, on one stream, whose order keeps its reuse safe.
    """

    def __init__(self, regions: Regions, buffer: torch.Tensor) -> None:
        self._regions = regions
        self._buffer = buffer

    # Not as a batch: torch-rbln makes that a synchronous copy.
    def to_host(self, staged: torch.Tensor, batch: range) -> None:
        collected = self._buffer[: staged.numel()]
        windows = collected.split_with_sizes(self._regions.sizes(batch))
        for window, region in zip(windows, self._regions.of(batch), strict=True):
            window.copy_(region, non_blocking=True)
        staged.copy_(collected, non_blocking=True)

    def to_device(self, staged: torch.Tensor, batch: range) -> None:
        collected = self._buffer[: staged.numel()]
        collected.copy_(staged, non_blocking=True)
        windows = collected.split_with_sizes(self._regions.sizes(batch))
        for window, region in zip(windows, self._regions.of(batch), strict=True):
            region.copy_(window, non_blocking=True)


class ChunkRows:
    """The windows of chunks that have one plane and one head, as MLA's have.

    Args:
        chunk_views: One ``[P, L, T, NH, HS]`` view per chunk, in host memory.
    """

    def __init__(self, chunk_views: Sequence[torch.Tensor]) -> None:
        self._views = chunk_views

    @property
    def dense(self) -> bool:
        """Whether the tokens of a layer lie one after the other."""
        return all(
            view.shape[0] == view.shape[3] == 1
            and (view.stride(2) == view.shape[4] or view.shape[2] == 1)
            for view in self._views
        )

    @property
    def pinned(self) -> bool:
        """Whether the device can reach the chunks."""
        return all(view.is_pinned() for view in self._views)

    def of(self, moves: Moves) -> list[torch.Tensor]:
        """Return the window of each move, 1-D and contiguous."""
        index = {name: column for column, name in enumerate(TILE_COLUMNS)}
        layers = [view[0, :, :, 0] for view in self._views]
        return [
            layers[tile[index["chunk"]]][
                tile[index["layer"]],
                tile[index["token"]] : tile[index["token"]]
                + tile[index["blocks"]] * tile[index["slots"]],
            ].view(-1)
            for tile in moves.tiles.tolist()
        ]
