# SPDX-License-Identifier: Apache-2.0
"""A test double of a KV backend: gather and scatter through a ring of pinned buffers.

It has the structure of a real one (buffers, events, streams, one block per copy, the
heads transposed on the host) and none of its layouts. On demand it makes one mistake.
"""

# Standard
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# Third Party
import torch

# First Party
from sim.tests.doubles.bugs import Bug

BUFFERS = 2


@dataclass(eq=False)
class Slot:
    """One pinned buffer, and the event behind the newest copy from or to it."""

    buffer: torch.Tensor
    event: Any


@dataclass(frozen=True)
class Piece:
    """One block of one layer, and its place in a chunk."""

    layer: int
    block: int
    position: int


def make_buffers(block: torch.Tensor) -> list[torch.Tensor]:
    """Return pinned buffers for blocks like this one ``[H, S, W]``."""
    return [
        torch.zeros(block.shape, dtype=block.dtype, pin_memory=True)
        for _ in range(BUFFERS)
    ]


class Pipeline:
    """Moves blocks ``[H, S, W]`` of device layers ``[NB, H, S, W]``.

    Chunks are ``[L, B * S, H, W]`` in host memory: ``B`` blocks of tokens, their heads
    side by side. Copies go to the calling thread's current stream and are complete on
    return.

    Args:
        buffers: Pinned staging, used by no one else.
        bug: The mistake to make, if any.
        before_read: Called between the wait for a copy and the read of its buffer.

    Attributes:
        waits_like: The pipeline whose events it waits for before it reads: itself.
    """

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        bug: Bug | None = None,
        before_read: Callable[[], object] = lambda: None,
    ) -> None:
        self._slots = [Slot(buffer, torch.rbln.Event()) for buffer in buffers]
        self._bug = bug
        self._before_read = before_read
        self.waits_like = self

    def gather(
        self,
        layers: Sequence[torch.Tensor],
        block_ids: Sequence[int],
        chunk: torch.Tensor,
    ) -> None:
        """Copy blocks into a chunk (D2H)."""
        stream = self._stream(layers[0].device)
        limit = len(self._slots)
        if self._bug is Bug.D2H_BUFFER_REUSED_EARLY:
            limit *= 2
        in_flight: deque[tuple[Slot, Piece]] = deque()
        try:
            for number, piece in enumerate(_pieces(layers, block_ids)):
                if len(in_flight) == limit:
                    self._read(*in_flight.popleft(), chunk)
                slot = self._slots[number % len(self._slots)]
                if self._bug is Bug.EVENT_BEFORE_COPY:
                    slot.event.record(stream)
                self._copy(slot.buffer, layers[piece.layer][piece.block])
                if self._bug is not Bug.EVENT_BEFORE_COPY:
                    slot.event.record(stream)
                in_flight.append((slot, piece))
            while in_flight:
                self._read(*in_flight.popleft(), chunk)
        except BaseException:
            if self._bug is not Bug.PINNED_FREED_IN_FLIGHT:
                stream.synchronize()
            raise

    def scatter(
        self,
        layers: Sequence[torch.Tensor],
        block_ids: Sequence[int],
        chunk: torch.Tensor,
    ) -> None:
        """Copy a chunk into blocks (H2D), straight from it where it can be."""
        stream = self._stream(layers[0].device)
        direct = chunk.is_pinned() and chunk.shape[2] == 1
        for number, piece in enumerate(_pieces(layers, block_ids)):
            block = layers[piece.layer][piece.block]
            part = _window(chunk, piece, block)
            if direct:
                self._copy(block, part)
                continue
            slot = self._slots[number % len(self._slots)]
            if self._bug is not Bug.H2D_BUFFER_REUSED_EARLY:
                slot.event.synchronize()
            slot.buffer.copy_(part)
            self._copy(block, slot.buffer)
            slot.event.record(stream)
        if self._bug not in (Bug.SCATTER_RETURNS_EARLY, Bug.STAGING_GIVEN_BACK_EARLY):
            stream.synchronize()

    def _stream(self, device: torch.device) -> Any:
        if self._bug is Bug.WRONG_STREAM:
            return torch.rbln.default_stream(device)
        if self._bug is Bug.WRONG_DEVICE:
            return torch.rbln.current_stream("rbln:0")
        return torch.rbln.current_stream(device)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._bug is Bug.WRONG_STREAM:
            device = source.device if target.is_cpu else target.device
            with torch.rbln.stream(torch.rbln.default_stream(device)):
                target.copy_(source, non_blocking=True)
            return
        target.copy_(source, non_blocking=True)

    def _read(self, slot: Slot, piece: Piece, chunk: torch.Tensor) -> None:
        if self._bug is not Bug.NO_WAIT_BEFORE_READ:
            self.waits_like._slots[self._slots.index(slot)].event.synchronize()
        self._before_read()
        _window(chunk, piece, slot.buffer).copy_(slot.buffer)


def _pieces(
    layers: Sequence[torch.Tensor], block_ids: Sequence[int]
) -> Iterator[Piece]:
    for layer in range(len(layers)):
        for position, block in enumerate(block_ids):
            yield Piece(layer, block, position)


def _window(chunk: torch.Tensor, piece: Piece, block: torch.Tensor) -> torch.Tensor:
    """Return a piece's part of the chunk as the device has it, ``[H, S, W]``."""
    slots = block.shape[1]
    start = piece.position * slots
    return chunk[piece.layer, start : start + slots].transpose(0, 1)
