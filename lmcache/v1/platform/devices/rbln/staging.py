# SPDX-License-Identifier: Apache-2.0
"""Bounded staging of transfers: pinned host buffers, streams and device buffers.

One arena serves every thread of a process. A transfer has a lease of it: a *lane*,
which is a stream of its own and device memory to collect in, and pinned buffers. Who
waits for a lease is served in order of arrival, and who has one waits for no other, so
waiting cannot deadlock.

What is free is never counted, but follows from the leases there are. A lease ends with
one store to :attr:`Lease.ended`. So nothing is lost where an interrupt strikes: the
next one who comes, goes, or waits sees that it has ended.
"""

# Future
from __future__ import annotations

# Standard
from typing import Any
import atexit
import functools
import os
import threading
import time

# Third Party
import torch

# First Party
from lmcache.logging import init_logger
from lmcache.v1.platform.devices.rbln import settings

logger = init_logger(__name__)

#: Bytes of one buffer. A copy of it spends little of its time on its fixed cost.
BUFFER_BYTES = 8 << 20
#: Transfers of a process that stage at a time, at most; a worker's four threads that
#: store and four that restore fit.
MAX_LEASES = 8

#: torch-rbln has 32 streams of a device, and gives them out one after the other.
_STREAM_POOL = 32
_PROBE_BYTES = 64
#: Probes that fail before the device counts as lost; as in the native transfer.
_MAX_PROBES = 64
#: Who waits looks that often, in seconds, whether anything has come back.
_LOOK_AGAIN_S = 0.02
_ASK_AGAIN_S = 0.001
#: Where failed transfers hold everything, others wait that long, in seconds, for the
#: device to become idle.
IDLE_WAIT_S = 1.0


#: Host and device memory, alike.
Probe = tuple[torch.Tensor, torch.Tensor]


class Lane:
    """What one transfer at a time uses.

    Attributes:
        streams: The lane's stream of each device.
        probes: Pinned and device memory of each device, to see what a stream is up to.
        collectors: Its device memory, by device and dtype.
    """

    def __init__(self) -> None:
        self.streams: dict[torch.device, Any] = {}
        self.probes: dict[torch.device, Probe] = {}
        self.collectors: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}


class Lease:
    """Staging of one transfer.

    Args:
        want: Buffers that the transfer can use; 0 if it needs a stream only. More than
            one only if free right now.

    Attributes:
        lane: The lane, once it is granted.
        buffers: The pinned buffers, uint8, ``BUFFER_BYTES`` each.
        stream: Stream of the copies; None where copies are synchronous.
        probe: The lane's memory to probe the stream with, if there is one.
        busy: Whether copies may be in flight on what it holds.
        ended: Whether the transfer is over.
    """

    def __init__(self, want: int) -> None:
        self.want = want
        self.lane: Lane | None = None
        self.buffers: list[torch.Tensor] = []
        self.stream: Any = None
        self.probe: Probe | None = None
        # Behind a probe that was issued to see whether the stream is idle.
        self.probed: Any = None
        self.probing_lock = threading.Lock()
        self.busy = False
        self.ended = False
        # Indices of its buffers, and the lane: one store makes it granted.
        self.grant: tuple[Lane, list[int]] | None = None
        self.waiting = threading.Lock()
        self.waiting.acquire()


class StagingArena:
    """A bounded set of buffers and lanes.

    Args:
        num_buffers: Buffers that it may hold, at least 1; made on demand.
        max_leases: Transfers at a time.
    """

    def __init__(self, num_buffers: int, max_leases: int) -> None:
        self._lock = threading.Lock()
        self._buffers: list[torch.Tensor | None] = [None] * num_buffers
        self._lanes = [Lane() for _ in range(min(max_leases, num_buffers))]
        # In order of arrival; without a grant they wait.
        self._leases: list[Lease] = []
        # Streams that callers were seen to use.
        self._callers: set[tuple[torch.device, int]] = set()

    def acquire(self, lease: Lease, device: torch.device) -> None:
        """Wait for the turn of a lease. Whatever happens, :meth:`release` it.

        Args:
            lease: A new lease.
            device: Device of the transfer.

        Raises:
            RuntimeError: If copies that failed may still use all staging, also after
                ``IDLE_WAIT_S``, or no buffer can be made.
        """
        self.look()
        with self._lock:
            self._leases.append(lease)
            self._serve()
        self._wait(lease)
        assert lease.grant is not None
        lease.lane, indices = lease.grant
        if supports_async_copies():
            probes = lease.lane.probes
            if device not in probes:
                probes[device] = make_probe(device)
            lease.probe = probes[device]
            lease.stream = self._stream(lease.lane, device)
        lease.buffers = self._make_buffers(indices)

    def release(self, lease: Lease) -> None:
        """Take a lease back that has ended, or that ends here. Idempotent.

        What copies may still use is kept until the lease's stream is known to be idle.
        """
        lease.ended = True
        try:
            self.look()
        except BaseException:
            # An interrupt must not keep the next one from being woken.
            self.look()
            raise

    def look(self) -> None:
        """Take back what leases no longer use, and serve those who wait."""
        with self._lock:
            self._serve()
            undrained = [lease for lease in self._leases if lease.ended]
        # Not under the lock: the driver may let a probe wait.
        for lease in undrained:
            # Who asks already is not waited for.
            if not lease.probing_lock.locked():
                with lease.probing_lock:
                    if lease.busy and _is_idle(lease):
                        lease.busy = False
        if undrained:
            with self._lock:
                self._serve()

    def in_use(self) -> tuple[int, int]:
        """Return how many leases there are: under way, and ended but not drained."""
        self.look()
        with self._lock:
            ended = sum(lease.ended for lease in self._leases)
            return len(self._leases) - ended, ended

    def close(self) -> None:
        """Free the memory; a transfer under way keeps its own until it ends."""
        with self._lock:
            self._buffers = [None] * len(self._buffers)
            for lane in self._lanes:
                lane.collectors.clear()
                lane.probes.clear()

    def _wait(self, lease: Lease) -> None:
        """Wait until a lease is granted.

        Raises:
            RuntimeError: Nobody is under way who could give anything back, and the
                device did not become idle.
        """
        hoped = time.monotonic()
        # Who ends a lease may be interrupted before he serves the next one.
        while not lease.waiting.acquire(timeout=_LOOK_AGAIN_S):
            self.look()
            with self._lock:
                under_way = any(
                    other.grant and not other.ended for other in self._leases
                )
                ended = sum(other.ended for other in self._leases)
            if under_way:
                hoped = time.monotonic()
            elif time.monotonic() - hoped > IDLE_WAIT_S:
                raise RuntimeError(
                    f"all staging of RBLN transfers is held by {ended} that failed, "
                    "whose copies are not known to have ended; it comes back when the "
                    "device is idle. If it never is, the device is lost: restart the "
                    "process"
                )

    def _serve(self) -> None:
        """Remove leases that hold nothing, and grant what is free; the lock is held."""
        self._leases = [
            lease for lease in self._leases if lease.busy or not lease.ended
        ]
        for lease in self._leases:
            if lease.ended:
                continue
            if lease.grant is None:
                lease.grant = self._free(lease.want)
            if lease.grant is None:
                # Those behind wait for their turn.
                break
            # Whoever was woken does not look at it again.
            if lease.waiting.locked():
                lease.waiting.release()

    def _free(self, want: int) -> tuple[Lane, list[int]] | None:
        """Return a free lane and buffers, those made first; the lock is held."""
        grants = [lease.grant for lease in self._leases if lease.grant]
        lanes = [lane for lane in self._lanes if all(lane is not g[0] for g in grants)]
        lent = {index for _, indices in grants for index in indices}
        free = [i for i in range(len(self._buffers)) if i not in lent]
        free.sort(key=lambda index: self._buffers[index] is None)
        if not lanes or (want and not free):
            return None
        return lanes[0], free[:want]

    def _make_buffers(self, indices: list[int]) -> list[torch.Tensor]:
        """Return the buffers of a grant, made where they are missing."""
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

    def _stream(self, lane: Lane, device: torch.device) -> Any:
        """Return the lane's stream, which no other lane and no caller has."""
        current = (device, torch_rbln().current_stream(device).stream_id)
        with self._lock:
            self._callers.add(current)
            for other in self._lanes:
                stream = other.streams.get(device)
                if stream is not None and stream.stream_id == current[1]:
                    # A transfer under way keeps it; the next gets another.
                    del other.streams[device]
            if device not in lane.streams:
                lane.streams[device] = self._draw(device, current[1])
            return lane.streams[device]

    def _draw(self, device: torch.device, current: int) -> Any:
        """Draw a stream of a device; the lock is held."""
        ours = {
            lane.streams[device].stream_id
            for lane in self._lanes
            if device in lane.streams
        }
        ours |= {
            lease.stream.stream_id
            for lease in self._leases
            if lease.stream is not None and lease.stream.device == device
        }
        callers = {stream for where, stream in self._callers if where == device}
        # A stream that a caller has had is better than none.
        for avoided in (ours | callers, ours | {current}):
            for _ in range(_STREAM_POOL):
                stream = torch_rbln().Stream(device)
                if stream.stream_id not in avoided:
                    return stream
        raise RuntimeError(
            f"torch-rbln has no stream of {device} that is free for a transfer; "
            f"transfers have {len(ours)}"
        )


def _is_idle(lease: Lease) -> bool:
    """Return whether a lease's stream is known to have nothing to do.

    A copy behind everything else tells; also, that no failure of its transfer is left
    which the next one would be told of. Nobody waits for it: who asks later sees.
    """
    if lease.stream is None or lease.probe is None:
        # Synchronous copies have ended.
        return True
    host, device = lease.probe
    try:
        if lease.probed is None:
            with torch.inference_mode(), torch_rbln().stream(lease.stream):
                host.copy_(device, non_blocking=True)
            event = torch_rbln().Event()
            event.record(lease.stream)
            lease.probed = event
        if lease.probed.query():
            return True
    except RuntimeError:
        # The old failure, or the device is lost: the next one asks again.
        lease.probed = None
    return False


def drain(lease: Lease) -> None:
    """Wait until nothing is in flight on a lease's stream; it is not busy any more.

    It stays busy if too many probes fail.

    Args:
        lease: A lease under way.
    """
    failed = 0
    while failed < _MAX_PROBES:
        if _is_idle(lease):
            lease.busy = False
            return
        if lease.probed is None:
            failed += 1
            continue
        try:
            lease.probed.synchronize()
        except RuntimeError:
            # The old failure, or the wait itself failed: only asking is left.
            time.sleep(_ASK_AGAIN_S)


def make_probe(device: torch.device) -> Probe:
    """Make a few bytes of pinned and of bound device memory."""
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
    """Make device memory to collect pieces in, ``BUFFER_BYTES``, bound there.

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
