# SPDX-License-Identifier: Apache-2.0
"""Byte movement between paged RBLN KV blocks and token-major host chunks.

Device copies run asynchronously on the current stream of the calling thread,
through a ring of pinned buffers: while one buffer is transposed on the host, the
copies of the next ones are in flight. A buffer is read on the host, or used again,
only after the event recorded behind its copies has completed. When a transfer
returns, every copy it issued is complete in both directions.

Callers run these functions under ``torch.inference_mode()``.
"""

# Future
from __future__ import annotations

# Standard
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import Any
import atexit
import threading

# Third Party
import torch

# First Party
from lmcache.logging import init_logger
from lmcache.v1.platform.devices.rbln.kv_layout import (
    KVGeometry,
    Piece,
    chunk_slice,
    device_slice,
)
from lmcache.v1.platform.devices.rbln.staging import (
    BUFFER_BYTES,
    RING_BUFFERS,
    StagingPool,
    staging_buffers_setting,
)

logger = init_logger(__name__)

#: Pieces in one staging buffer start at multiples of this many bytes.
_ALIGNMENT = 64

#: Integer types of the same width, so that host copies move bits and not numbers.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Pieces that share one staging buffer, with their byte offsets in it.
_Batch = list[tuple[Piece, int]]


def max_piece_elements(geometry: KVGeometry) -> int:
    """Return the largest piece that a transfer of ``geometry`` can stage.

    Args:
        geometry: Geometry of the KV cache.

    Returns:
        Elements that fit one staging buffer. Caches in host memory have no staging
        and hence no limit but their own size.

    Raises:
        ValueError: If elements are of no width that host copies know, or not even one
            token of one head fits a staging buffer.
    """
    if geometry.dtype.itemsize not in _BITS:
        raise ValueError(
            f"the KV cache is {geometry.dtype}, wanted elements of "
            f"{', '.join(map(str, _BITS))} bytes"
        )
    if geometry.device.type == "cpu":
        return (
            geometry.num_blocks
            * geometry.num_planes
            * geometry.num_heads
            * (geometry.block_size * geometry.head_size)
        )
    elements = BUFFER_BYTES // geometry.dtype.itemsize
    if geometry.head_size > elements:
        raise ValueError(
            f"head size {geometry.head_size} of {geometry.dtype} does not fit a "
            f"staging buffer of {BUFFER_BYTES} bytes"
        )
    return elements


def gather(
    geometry: KVGeometry,
    block_views: Sequence[torch.Tensor],
    chunk_views: Sequence[torch.Tensor],
    pieces: Iterable[Piece],
) -> None:
    """Copy pieces of paged blocks into chunks (D2H).

    Args:
        geometry: Geometry of the KV cache.
        block_views: One ``[NB, P, NH, BS, HS]`` view per layer.
        chunk_views: One ``[P, L, T, NH, HS]`` view per chunk, in host memory.
        pieces: What to copy; each element at most once.

    Raises:
        RuntimeError: If a device copy fails. No copy is then in flight, and the
            chunks' contents are undefined.
    """
    if geometry.device.type == "cpu":
        for piece in pieces:
            _copy_bits(
                chunk_slice(chunk_views, piece), device_slice(block_views, piece)
            )
        return

    def finish(copied: _Staged) -> None:
        copied.wait()
        for piece, staged in copied.windows(geometry):
            _copy_bits(chunk_slice(chunk_views, piece), staged)

    with _Ring(geometry) as ring:
        for batch in _batches(pieces, geometry):
            if not ring.has_idle():
                finish(ring.oldest())
            staged = ring.stage(batch)
            for piece, window in staged.windows(geometry):
                window.copy_(
                    device_slice(block_views, piece), non_blocking=ring.asynchronous
                )
            staged.record()
        while ring.in_flight():
            finish(ring.oldest())


def scatter(
    geometry: KVGeometry,
    block_views: Sequence[torch.Tensor],
    chunk_views: Sequence[torch.Tensor],
    pieces: Iterable[Piece],
) -> None:
    """Copy pieces of chunks into paged blocks (H2D).

    Args:
        geometry: Geometry of the KV cache.
        block_views: One ``[NB, P, NH, BS, HS]`` view per layer.
        chunk_views: One ``[P, L, T, NH, HS]`` view per chunk, in host memory.
        pieces: What to copy; each element at most once.

    Raises:
        RuntimeError: If a device copy fails. No copy is then in flight, and the
            contents of the blocks named by ``pieces`` are undefined.
    """
    if geometry.device.type == "cpu":
        for piece in pieces:
            _copy_bits(
                device_slice(block_views, piece), chunk_slice(chunk_views, piece)
            )
        return
    with _Ring(geometry) as ring:
        for batch in _batches(pieces, geometry):
            if not ring.has_idle():
                ring.oldest().wait()
            staged = ring.stage(batch)
            windows = list(staged.windows(geometry))
            for piece, window in windows:
                _copy_bits(window, chunk_slice(chunk_views, piece))
            for piece, window in windows:
                device_slice(block_views, piece).copy_(
                    window, non_blocking=ring.asynchronous
                )
            staged.record()
        while ring.in_flight():
            ring.oldest().wait()


def _copy_bits(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy host memory bit by bit, whatever the element type."""
    bits = _BITS[source.element_size()]
    destination.view(bits).copy_(source.view(bits))


def _batches(pieces: Iterable[Piece], geometry: KVGeometry) -> Iterator[_Batch]:
    """Pack consecutive pieces into staging buffers."""
    batch: _Batch = []
    used = 0
    for piece in pieces:
        size = piece.elements(geometry.head_size) * geometry.dtype.itemsize
        if batch and used + size > BUFFER_BYTES:
            yield batch
            batch, used = [], 0
        batch.append((piece, used))
        used += -(-size // _ALIGNMENT) * _ALIGNMENT
    if batch:
        yield batch


class _Staged:
    """One staging buffer with the batch that is copied into or out of it."""

    def __init__(
        self, buffer: torch.Tensor, batch: _Batch, event: Any, stream: Any
    ) -> None:
        self.buffer = buffer
        self._batch = batch
        self._event = event
        self._stream = stream

    def windows(self, geometry: KVGeometry) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Yield each piece with its part of the buffer, shaped like the device's."""
        for piece, offset in self._batch:
            size = piece.elements(geometry.head_size) * geometry.dtype.itemsize
            yield (
                piece,
                self.buffer[offset : offset + size]
                .view(geometry.dtype)
                .view(
                    piece.blocks,
                    piece.planes,
                    piece.heads,
                    piece.slots,
                    geometry.head_size,
                ),
            )

    def record(self) -> None:
        """Mark the end of the batch's copies on the stream."""
        if self._event is not None:
            self._event.record(self._stream)

    def wait(self) -> None:
        """Wait until the batch's copies are complete."""
        if self._event is not None:
            self._event.synchronize()


class _Ring:
    """The staging buffers of one transfer and the order in which they are in flight.

    Leaving the ``with`` block by an exception drains the stream before a buffer goes
    back to the pool. A buffer whose copies were not drained is quarantined.
    """

    def __init__(self, geometry: KVGeometry) -> None:
        self.asynchronous = _supports_async_copies()
        self._device = geometry.device
        self._pool = _pool()
        self._queue: deque[_Staged] = deque()
        self._stream: Any = None

    def __enter__(self) -> _Ring:
        with ExitStack() as borrowing:
            self._buffers = borrowing.enter_context(self._pool.ring(RING_BUFFERS))
            if self.asynchronous:
                self._stream = torch_rbln().current_stream(self._device)
            self._idle = list(self._buffers)
            self._borrowed = borrowing.pop_all()
        return self

    def has_idle(self) -> bool:
        """Return whether a buffer has no copies in flight."""
        return bool(self._idle)

    def in_flight(self) -> bool:
        """Return whether a batch waits to be finished."""
        return bool(self._queue)

    def stage(self, batch: _Batch) -> _Staged:
        """Put a batch at the end of the queue, on an idle buffer."""
        event = torch_rbln().Event() if self.asynchronous else None
        staged = _Staged(self._idle.pop(), batch, event, self._stream)
        self._queue.append(staged)
        return staged

    def oldest(self) -> _Staged:
        """Take the oldest batch out of the queue; the caller waits for it.

        Its buffer is idle from the next :meth:`stage` on, and no caller stages before
        it has waited for the batch and read its bytes.
        """
        staged = self._queue.popleft()
        self._idle.append(staged.buffer)
        return staged

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        drained = kind is None or not self.asynchronous
        with self._borrowed:
            try:
                if not drained:
                    self._stream.synchronize()
                    drained = True
            except Exception:
                logger.exception(
                    "RBLN copies could not be drained after a failed transfer; %d "
                    "staging buffers will not be used again",
                    len(self._buffers),
                )
            finally:
                # Also when an interrupt ends the wait.
                if not drained:
                    self._pool.quarantine(list(self._buffers))
                    self._buffers.clear()


def torch_rbln() -> Any:
    """Return ``torch.rbln``, which torch-rbln adds at run time."""
    return torch.rbln  # type: ignore[attr-defined]


@lru_cache(maxsize=1)
def _supports_async_copies() -> bool:
    """Return whether torch-rbln has streams, events and pinned memory.

    Older releases lack them; transfers then copy synchronously, which is said once.
    """
    missing = [
        name
        for name in ("Stream", "Event", "current_stream")
        if not hasattr(torch_rbln(), name)
    ]
    try:
        torch.empty(1, dtype=torch.uint8, pin_memory=True)
    except (RuntimeError, TypeError) as exc:
        missing.append(f"pinned memory ({exc})")
    if missing:
        logger.warning(
            "RBLN KV copies run synchronously and slower, without %s. torch-rbln has "
            "these since 0.12",
            ", ".join(missing),
        )
    return not missing


def _make_buffer() -> torch.Tensor:
    return torch.empty(
        BUFFER_BYTES, dtype=torch.uint8, pin_memory=_supports_async_copies()
    )


_pool_lock = threading.Lock()
_process_pool: StagingPool | None = None


def _pool() -> StagingPool:
    """Return the staging pool of this process."""
    global _process_pool
    with _pool_lock:
        if _process_pool is None:
            _process_pool = StagingPool(staging_buffers_setting(), _make_buffer)
            # Pinned memory goes back before torch-rbln shuts its runtime down.
            atexit.register(_process_pool.close)
        return _process_pool
