# SPDX-License-Identifier: Apache-2.0
"""The staging buffers of one transfer, and the order in which they are in flight."""

# Future
from __future__ import annotations

# Standard
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any
import atexit
import threading

# Third Party
import torch

# First Party
from lmcache.logging import init_logger
from lmcache.v1.platform.devices.rbln import staging
from lmcache.v1.platform.devices.rbln.kv_moves import Moves
from lmcache.v1.platform.devices.rbln.staging import Loan, StagingPool, once

logger = init_logger(__name__)

#: Parts of one buffer that need no second one: one is copied, one is transposed.
_ENOUGH_PARTS = 2


class Staged:
    """A part of a staging buffer, with the moves that are copied into or out of it.

    Args:
        elements: 1-D, in host memory, in the cache's dtype.
        stream: Stream of the copies, or None where they are synchronous.

    Attributes:
        buffer: The same memory as uint8.
        batch: Indices of consecutive moves.
    """

    def __init__(self, elements: torch.Tensor, stream: Any) -> None:
        self.buffer = elements.view(torch.uint8)
        self.batch = range(0)
        self._elements = elements
        self._stream = stream
        self._event = None if stream is None else torch_rbln().Event()

    def elements(self, moves: Moves) -> torch.Tensor:
        """Return the memory that the batch uses, 1-D, in the cache's dtype."""
        return self._elements[: moves.elements_of(self.batch)]

    def record(self) -> None:
        """Mark the end of the batch's copies on the stream."""
        if self._event is not None:
            self._event.record(self._stream)

    def wait(self) -> None:
        """Wait until the batch's copies are complete."""
        if self._event is not None:
            self._event.synchronize()


class Ring:
    """Staging buffers borrowed for one transfer.

    Leaving the ``with`` block by an exception drains the stream before a buffer goes
    back to its pool. A buffer whose copies were not drained is never used again.

    Args:
        device: Device of the transfer.

    Attributes:
        asynchronous: Whether copies are asynchronous, on the calling thread's current
            stream and pinned memory.
        part_bytes: Bytes of a part, which one batch can use; at first a whole buffer.
        parts: Parts of each buffer that are used.
    """

    def __init__(self, device: torch.device) -> None:
        self.asynchronous = supports_async_copies()
        self._device = device
        self.part_bytes = staging.BUFFER_BYTES
        self.parts = 1
        self._queue: deque[Staged] = deque()
        self._loans: list[Loan] = []

    def __enter__(self) -> Ring:
        # A loan that an interrupt keeps from being stored is dropped: it has ended.
        self._pool = _pool()
        try:
            self._loans.append(self._pool.borrow(staging.RING_BUFFERS))
            self._loans_seen = self._pool.loans
        except BaseException:
            self._give_back()
            raise
        return self

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The borrowed host buffers."""
        return self._loans[0].buffers

    def divide(self, part_bytes: int, max_parts: int) -> None:
        """Stage in parts of buffers from now on.

        Two parts keep the copies busy, so other buffers go back to whoever waits.

        Args:
            part_bytes: Bytes of a part, at most those of a buffer, whole elements.
            max_parts: Parts of a buffer that are used.
        """
        self.part_bytes = part_bytes
        self.parts = min(max_parts, staging.BUFFER_BYTES // part_bytes)
        if self.parts >= _ENOUGH_PARTS:
            self._loans[0].keep(1)

    def make_parts(self, dtype: torch.dtype) -> Iterator[Staged]:
        """Return the parts of all buffers, each made when it is asked for.

        Args:
            dtype: Element type of the cache.
        """
        stream = self._stream() if self.asynchronous else None
        used, part_bytes = self.parts * self.part_bytes, self.part_bytes
        # Without the ring, which an interrupt may drop.
        return (
            Staged(part.view(dtype), stream)
            for buffer in self.buffers
            for part in buffer[:used].split(part_bytes)
        )

    def borrow_device_buffer(self, pool: StagingPool) -> torch.Tensor | None:
        """Borrow device memory for the rest of the transfer.

        Args:
            pool: Pool of the device.

        Returns:
            A buffer, or None if there is no memory for one, which is said once.
        """
        try:
            loan = pool.borrow(1)
        except RuntimeError as exc:
            _warn_without_device_buffers(str(exc))
            return None
        self._loans.append(loan)
        return loan.buffers[0]

    def begin_copies(self) -> None:
        """Copies will be in flight; each stays so until the ring has waited for it."""
        if self.asynchronous:
            for loan in self._loans:
                loan.begin_copies()

    def end_copies(self) -> None:
        """No copy is in flight; the caller knows, because it has waited."""
        for loan in self._loans:
            loan.end_copies()

    def is_alone(self) -> bool:
        """Return whether no other transfer has staging, or had since the last call."""
        before, self._loans_seen = self._loans_seen, self._pool.loans
        alone = self._pool.lent() == len(self.buffers)
        return alone and before == self._loans_seen

    def stage(self, part: Staged, batch: range) -> None:
        """Put a batch at the end of the queue.

        Args:
            part: A part that is not in the queue.
            batch: Indices of consecutive moves.
        """
        part.batch = batch
        self._queue.append(part)

    def in_flight(self) -> bool:
        """Return whether a batch waits to be finished."""
        return bool(self._queue)

    def oldest(self) -> Staged:
        """Take the oldest batch out of the queue.

        The caller waits for it, and has read its bytes before the part is used again.
        """
        return self._queue.popleft()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None and any(loan.copying for loan in self._loans):
                self._stream().synchronize()
            # Only now: until here a buffer that comes back counts as lost.
            self.end_copies()
        except Exception:
            logger.exception(
                "RBLN copies could not be drained after a failed transfer; %d staging "
                "buffers will not be used again",
                sum(len(loan.slots) for loan in self._loans),
            )
        finally:
            self._give_back()

    def _stream(self) -> Any:
        return torch_rbln().current_stream(self._device)

    def _give_back(self) -> None:
        for loan in self._loans:
            loan.__exit__()


#: Chunks that the device copies to or from by itself; those stay whose copies were not
#: seen to end, so that their memory is not freed.
_straight: dict[object, Sequence[torch.Tensor]] = {}


def copy_straight(
    device: torch.device,
    targets: list[torch.Tensor],
    sources: list[torch.Tensor],
    chunks: Sequence[torch.Tensor],
) -> None:
    """Copy between blocks and pinned chunks without staging, and wait for it.

    Args:
        device: Device of the blocks.
        targets: What to write.
        sources: What to read, as ``targets``.
        chunks: The chunks that hold one side of each copy.

    Raises:
        RuntimeError: If a copy fails. If the device could not be waited for either, the
            message says that it may still use the chunks' memory, which is then kept.
    """
    stream = torch_rbln().current_stream(device)
    key = object()
    _straight[key] = chunks
    try:
        torch._foreach_copy_(targets, sources, non_blocking=True)
        stream.synchronize()
    except BaseException as failure:
        try:
            stream.synchronize()
        except Exception as exc:
            raise RuntimeError(
                "RBLN copies could not be drained after a failed transfer, so the NPU "
                f"may still access the memory of its {len(chunks)} chunks. They are "
                "kept; do not reuse their memory and restart the process"
            ) from exc
        del _straight[key]
        raise failure
    del _straight[key]


def torch_rbln() -> Any:
    """Return ``torch.rbln``, which torch-rbln adds at run time."""
    return torch.rbln  # type: ignore[attr-defined]


@once
def supports_async_copies() -> bool:
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


@once
def _warn_without_device_buffers(reason: str) -> None:
    logger.warning(
        "Small pieces of the KV cache are copied one by one and slower, without device "
        "memory to collect them in: %s",
        reason,
    )


def _make_buffer() -> torch.Tensor:
    return torch.empty(
        staging.BUFFER_BYTES, dtype=torch.uint8, pin_memory=supports_async_copies()
    )


_pool_lock = threading.Lock()
_process_pool: StagingPool | None = None


def _pool() -> StagingPool:
    """Return the staging pool of this process."""
    global _process_pool
    with _pool_lock:
        if _process_pool is None:
            _process_pool = StagingPool(
                staging.staging_buffers_setting(),
                _make_buffer,
                staging.max_transfers(),
            )
            # Pinned memory goes back before torch-rbln shuts its runtime down.
            atexit.register(_process_pool.close)
        return _process_pool
