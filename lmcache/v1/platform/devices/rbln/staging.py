# SPDX-License-Identifier: Apache-2.0
"""Bounded staging of transfers: pinned host buffers, lanes, and who has them.

One arena serves every thread of a process. A transfer has a lease of it: a *lane*,
which is a stream of its own and device memory to collect in, and pinned buffers. Who
waits for a lease is served in order of arrival, and who has one waits for no other, so
waiting cannot deadlock. What is free follows from the leases there are.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable
from typing import Any
import atexit
import os
import threading

# Third Party
import torch

# First Party
from lmcache.logging import init_logger
from lmcache.v1.platform.devices.rbln import lanes, settings
from lmcache.v1.platform.devices.rbln.lanes import Lane, LanePool

logger = init_logger(__name__)

#: Bytes of one buffer. A copy of it spends little of its time on its fixed cost.
BUFFER_BYTES = 8 << 20
#: Transfers of a process that stage at a time, at most; a worker's four threads that
#: store and four that restore fit.
MAX_LEASES = 8


class Lease:
    """Staging of one transfer.

    Args:
        device: Device of the transfer.
        want: Buffers that it can use; 0 if it needs a stream only. More than one only
            if free right now.
        plan: Keeps what is copied alive as long as the lease.

    Attributes:
        lane: The lane, once it is granted.
        buffers: The pinned buffers, uint8, ``BUFFER_BYTES`` each.
        busy: Whether copies may be in flight on what it holds.
        ended: Whether the transfer is over.
    """

    def __init__(self, device: torch.device, want: int, plan: Any = None) -> None:
        self.device = device
        self.want = want
        self.plan = plan
        self.lane: Lane | None = None
        # Of the arena's buffers.
        self.indices: list[int] = []
        self.buffers: list[torch.Tensor] = []
        self.busy = False
        self.ended = False
        # Whether a thread asks its lane: until that is done nobody else may use it.
        self.asked = False


class StagingArena:
    """A bounded set of buffers and lanes.

    Args:
        num_buffers: Buffers that it may hold, at least 1; made on demand.
        max_leases: Transfers at a time.
    """

    def __init__(self, num_buffers: int, max_leases: int) -> None:
        # Entered by itself: between the calls of a condition an interrupt leaks it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._max_leases = min(max_leases, num_buffers)
        self._buffers: list[torch.Tensor | None] = [None] * num_buffers
        self._lanes = LanePool()
        # In order of arrival; without a lane they wait.
        self._leases: list[Lease] = []

    def acquire(self, lease: Lease) -> None:
        """Wait for the turn of a lease. Whatever happens, :meth:`release` it.

        Raises:
            RuntimeError: If copies that failed may still use all staging, or no buffer
                can be made.
        """
        if self._leases:
            self.take_back()
        with self._lock:
            self._lanes.see_caller(lease.device)
            self._leases.append(lease)
            granted = self._grant(lease)
        while not granted and not self._wait(lease):
            # Nobody else gives anything back: wait for the device, without the lock.
            failed = self._ask(Lane.drain)
            if failed and all(other.busy for other in failed):
                raise RuntimeError(
                    f"all staging of RBLN transfers is held by {len(failed)} that "
                    "failed, whose copies are not known to have ended; it comes back "
                    "when the device is idle. If it never is, the device is lost: "
                    "restart the process"
                )
        if lease.lane:
            lease.lane.prepare(lease.device)
        lease.buffers = self._make_buffers(lease.indices)

    def release(self, lease: Lease) -> None:
        """Take a lease back. Idempotent.

        What copies may still use is kept until the lease's stream is known to be idle.
        """
        lease.ended = True
        self.take_back()

    def take_back(self) -> None:
        """Take back what leases no longer use, and wake those who wait."""
        self._ask(Lane.is_idle)

    def in_use(self) -> tuple[int, int]:
        """Return how many leases there are: under way, and ended but not drained."""
        self.take_back()
        with self._lock:
            self._forget()
            ended = sum(lease.ended for lease in self._leases)
            return len(self._leases) - ended, ended

    def close(self) -> None:
        """Free the memory; a transfer under way keeps its own until it ends."""
        with self._lock:
            self._forget()
            self._buffers = [None] * len(self._buffers)
            self._lanes.by_device.clear()

    def _ask(self, is_idle: Callable[[Lane], bool]) -> list[Lease]:
        """Ask whether ended leases are idle, except those that somebody asks already.

        Returns:
            Those that were asked.
        """
        # The driver may hold up who asks, so: without the lock, and those whom others'
        # leases are enough for go on before.
        self._notify()
        asked = []
        for lease in [each for each in self._leases if each.ended and each.busy]:
            mine = False
            try:
                with self._lock:
                    if not lease.asked and lease.busy:
                        mine = lease.asked = True
                if mine and lease.lane:
                    asked.append(lease)
                    lease.busy = not is_idle(lease.lane)
            finally:
                if mine:
                    lease.asked = False
                self._notify()
        return asked

    def _notify(self) -> None:
        """Let those who wait look again."""
        with self._lock:
            self._changed.notify_all()

    def _wait(self, lease: Lease) -> bool:
        """Wait until a lease is granted, or nobody is left who can give anything back.

        Returns:
            Whether it is granted.
        """
        with self._lock:
            self._changed.wait_for(lambda: self._grant(lease) or self._is_stuck(lease))
            # The next one may be served too.
            self._changed.notify_all()
            return lease.lane is not None

    def _forget(self) -> None:
        """Remove leases that hold nothing any more; the lock is held."""
        self._leases = [
            lease
            for lease in self._leases
            if lease.busy or lease.asked or not lease.ended
        ]

    def _is_stuck(self, lease: Lease) -> bool:
        """Return whether only failed leases stand before one; the lock is held."""
        held = [other for other in self._leases if other.lane]
        return (
            all(other.ended and not other.asked for other in held)
            and lease is self._next()
        )

    def _next(self) -> Lease:
        """Return the lease whose turn it is; the lock is held."""
        return next(
            each for each in self._leases if each.lane is None and not each.ended
        )

    def _grant(self, lease: Lease) -> bool:
        """Grant a lease if it is its turn, and enough is free; the lock is held."""
        self._forget()
        held = [other for other in self._leases if other.lane]
        lent = {index for other in held for index in other.indices}
        free = [i for i in range(len(self._buffers)) if i not in lent]
        if (
            lease is not self._next()
            or len(held) >= self._max_leases
            or (lease.want and not free)
        ):
            return False
        # Those made first.
        free.sort(key=lambda index: self._buffers[index] is None)
        lease.indices = free[: lease.want]
        lease.lane = self._lanes.take(lease.device, [other.lane for other in held])
        return True

    def _make_buffers(self, indices: list[int]) -> list[torch.Tensor]:
        """Return the buffers of a lease, made where they are missing."""
        made: list[torch.Tensor] = []
        for index in indices:
            buffer = self._buffers[index]
            if buffer is None:
                try:
                    buffer = self._buffers[index] = make_buffer()
                except (RuntimeError, MemoryError) as exc:
                    if made:
                        warn_once(
                            "RBLN transfers have fewer staging buffers and may be "
                            "slower; another one can't be made: %s",
                            exc,
                        )
                        break
                    raise RuntimeError(
                        f"{BUFFER_BYTES >> 20} MiB of pinned host memory for staging "
                        f"can't be had: {exc}; free host memory, or lower "
                        f"{settings.STAGING_ENV_VAR}"
                    ) from exc
            made.append(buffer)
        return made


def make_buffer() -> torch.Tensor:
    """Make one buffer; pinned if copies are asynchronous."""
    return torch.empty(
        BUFFER_BYTES, dtype=torch.uint8, pin_memory=lanes.supports_async_copies()
    )


_warned: set[str] = set()


def warn_once(message: str, reason: object) -> None:
    """Log a warning, once a process whatever the reasons are.

    Args:
        message: With one ``%s``.
        reason: What goes there.
    """
    if message not in _warned:
        _warned.add(message)
        logger.warning(message, reason)


def max_transfers() -> int:
    """Return how many transfers of a process stage at a time; others wait.

    Each keeps a CPU busy. With more of them than CPUs none is done sooner, and they
    push one another's staging out of the cache.
    """
    # Of the main thread: others may be bound to fewer.
    return min(MAX_LEASES, len(os.sched_getaffinity(os.getpid())))


_arena_lock = threading.Lock()
_process_arena: StagingArena | None = None


def arena() -> StagingArena:
    """Return the staging arena of this process."""
    global _process_arena
    with _arena_lock:
        if _process_arena is None:
            buffers = (settings.staging_mib() << 20) // BUFFER_BYTES
            _process_arena = StagingArena(buffers, max_transfers())
            # Memory goes back before torch-rbln shuts its runtime down.
            atexit.register(_process_arena.close)
        return _process_arena
