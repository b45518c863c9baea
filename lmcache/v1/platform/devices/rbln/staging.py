# SPDX-License-Identifier: Apache-2.0
"""Bounded staging of transfers: pinned host buffers, streams and device buffers.

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
import contextlib
import functools
import os
import threading
import weakref

# Third Party
import torch

# First Party
from lmcache.logging import init_logger
from lmcache.v1.platform.devices.rbln import settings
from lmcache.v1.platform.devices.rbln.native import kv_transpose

logger = init_logger(__name__)

#: Bytes of one buffer. A copy of it spends little of its time on its fixed cost.
BUFFER_BYTES = 8 << 20
#: Transfers of a process that stage at a time, at most; a worker's four threads that
#: store and four that restore fit.
MAX_LEASES = 8

#: torch-rbln has 32 streams of a device, and gives them out one after the other.
_STREAM_POOL = 32
_PROBE_BYTES = 64


class Lane:
    """What one transfer at a time uses on one device.

    Attributes:
        stream: Stream of its copies; None where copies are synchronous.
        probe: Pinned and device memory, alike, to see what the stream is up to.
        collectors: Its device memory to collect in, by dtype.
    """

    def __init__(self) -> None:
        self.stream: Any = None
        self.probe: tuple[torch.Tensor, torch.Tensor] | None = None
        self.collectors: dict[torch.dtype, torch.Tensor] = {}

    def is_idle(self) -> bool:
        """Return whether nothing is in flight, without waiting for it.

        A failure is told again and again until the stream has something new to do: so
        it gets some, and who asks later sees. So only one may ask, while nobody else
        uses the lane.
        """
        try:
            return self.stream is None or self.stream.query()
        except RuntimeError:
            # The old failure, or the device is lost.
            with contextlib.suppress(RuntimeError), torch_rbln().stream(self.stream):
                if self.probe:
                    self.probe[0].copy_(self.probe[1], non_blocking=True)
            return False


class _Inquiry:
    """Marks the leases whose lanes a thread asks, as long as it asks."""


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
        # Of who asks its lane. It ends with him, also if he is interrupted.
        self._inquiry: weakref.ref[_Inquiry] | None = None

    @property
    def asked(self) -> bool:
        """Whether a thread asks its lane: until that is done nobody else may use it."""
        return self._inquiry is not None and self._inquiry() is not None

    def mark_asked(self, inquiry: _Inquiry) -> None:
        """Say that its lane is asked, as long as the inquiry lives."""
        self._inquiry = weakref.ref(inquiry)


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
        self._lanes: dict[torch.device, list[Lane]] = {}
        # In order of arrival; without a lane they wait.
        self._leases: list[Lease] = []
        # Streams that callers were seen to use.
        self._callers: dict[torch.device, set[int]] = {}

    def acquire(self, lease: Lease) -> None:
        """Wait for the turn of a lease. Whatever happens, :meth:`release` it.

        Raises:
            RuntimeError: If copies that failed may still use all staging, or no buffer
                can be made.
        """
        if self._leases:
            self.take_back()
        with self._lock:
            if supports_async_copies():
                current = torch_rbln().current_stream(lease.device).stream_id
                self._callers.setdefault(lease.device, set()).add(current)
            self._leases.append(lease)
            granted = self._grant(lease)
        while not granted and not self._wait(lease):
            # Nobody else gives anything back: wait for the device, without the lock.
            failed = self._ask(_drain)
            if failed and all(other.busy for other in failed):
                raise RuntimeError(
                    f"all staging of RBLN transfers is held by {len(failed)} that "
                    "failed, whose copies are not known to have ended; it comes back "
                    "when the device is idle. If it never is, the device is lost: "
                    "restart the process"
                )
        if lease.lane and lease.lane.probe is None and supports_async_copies():
            lease.lane.probe = make_probe(lease.device)
        lease.buffers = self._make_buffers(lease.indices)

    def release(self, lease: Lease) -> None:
        """Take a lease back. Idempotent.

        What copies may still use is kept until the lease's stream is known to be idle.
        """
        lease.ended = True
        self.take_back()

    def take_back(self) -> None:
        """Take back what leases no longer use, and wake those who wait."""
        self._ask(lambda lease: lease.lane is None or lease.lane.is_idle())

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
            self._lanes.clear()

    def _ask(self, is_idle: Callable[[Lease], bool]) -> list[Lease]:
        """Ask whether ended leases are idle, except those that somebody asks already.

        Returns:
            Those that were asked.
        """
        inquiry = _Inquiry()
        with self._lock:
            asked = [
                each
                for each in self._leases
                if each.ended and each.busy and not each.asked
            ]
            for lease in asked:
                lease.mark_asked(inquiry)
            # The driver may hold up who asks, so: without the lock, and those whom
            # others' leases are enough for go on before.
            self._changed.notify_all()
        try:
            for lease in asked:
                lease.busy = not is_idle(lease)
        finally:
            with self._lock:
                del inquiry
                self._changed.notify_all()
        return asked

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
        lease.lane = self._free_lane(lease.device, [other.lane for other in held])
        return True

    def _free_lane(self, device: torch.device, taken: list[Lane | None]) -> Lane:
        """Return a lane that nobody has, with a stream of its own; the lock is held."""
        lanes = self._lanes.setdefault(device, [])
        lane = next((lane for lane in lanes if lane not in taken), None)
        if lane is None:
            lane = Lane()
            lanes.append(lane)
        if not supports_async_copies():
            return lane
        callers = self._callers[device]
        ours = {
            each.stream.stream_id for each in lanes if each.stream and each is not lane
        }
        if lane.stream is None or lane.stream.stream_id in callers:
            # A stream that a caller has had is better than none.
            current = torch_rbln().current_stream(device).stream_id
            lane.stream = _draw(device, ours | callers) or _draw(
                device, ours | {current}
            )
        if lane.stream is None:
            raise RuntimeError(
                f"torch-rbln has no stream of {device} that is free for a transfer; "
                f"transfers have {len(ours)}"
            )
        return lane

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


def _draw(device: torch.device, avoided: set[int]) -> Any:
    """Return a stream of a device that is none of some, or None."""
    for _ in range(_STREAM_POOL):
        stream = torch_rbln().Stream(device)
        if stream.stream_id not in avoided:
            return stream
    return None


def _drain(lease: Lease) -> bool:
    """Wait until nothing is in flight on a lease's stream; tell whether that is so."""
    lane = lease.lane
    if lane is None or lane.stream is None:
        return True
    return kv_transpose().drain(lane.stream, lane.probe)


def make_probe(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a few bytes of pinned and of bound device memory."""
    # Inference tensors can't be written by who asks outside of inference mode.
    with torch.inference_mode(False):
        host = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
        remote = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)
        torch_rbln().bind_device_memory(remote)
    return host, remote


def make_buffer() -> torch.Tensor:
    """Make one buffer; pinned if copies are asynchronous."""
    return torch.empty(
        BUFFER_BYTES, dtype=torch.uint8, pin_memory=supports_async_copies()
    )


def make_collector(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Make device memory to collect segments in, ``BUFFER_BYTES``, bound there.

    Raises:
        RuntimeError: If the device has no memory for it.
    """
    elements = BUFFER_BYTES // dtype.itemsize
    buffer = torch.empty(elements, dtype=dtype, device=device)
    torch_rbln().bind_device_memory(buffer)
    return buffer


def torch_rbln() -> Any:
    """Return ``torch.rbln``, which torch-rbln adds at run time."""
    return torch.rbln  # type: ignore[attr-defined]


@functools.cache
def supports_async_copies() -> bool:
    """Return whether torch-rbln has streams, events and pinned memory.

    Older releases lack them; transfers then copy synchronously, which is logged once.
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
