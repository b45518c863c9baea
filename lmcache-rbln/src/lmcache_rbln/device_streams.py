# SPDX-License-Identifier: Apache-2.0
"""Streams for copies whose failures must be reported to whoever issued them.

A stream tells of a failure to the first who waits for it, whoever queued the work. On
a stream that others use, a copy that failed may thus look as if it had succeeded, and a
failure of others like one of the copy. So each transfer has a stream of its own while
it lasts, and leaves it idle.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
import threading

# Third Party
import torch

# First Party
from lmcache.logging import init_logger

logger = init_logger(__name__)

#: Streams of a device at most. torch-rbln has few and hands them out again and again,
#: so those of others must not come round.
MOST_STREAMS = 8
#: Waits for a stream that fails until it is given up.
_MOST_WAITS = 8


class InFlightError(RuntimeError):
    """Copies may be under way still: what they read and write must not be reused."""


class DeviceStreams:
    """Streams of one device, each for one transfer at a time; any thread may call.

    Args:
        device: The device.
        most: Streams at most; a transfer waits for one.
    """

    def __init__(self, device: torch.device, most: int = MOST_STREAMS) -> None:
        self._device = device
        self._idle: list[_OwnStream] = []
        self._to_make = most
        self._usable = most
        self._returned = threading.Condition()

    @contextmanager
    def transfer(self, ordered: bool = False) -> Iterator[Copies]:
        """Run the copies that the ``with`` block issues; complete at its end.

        Copies that do not wait for themselves are issued through what it gives.

        Args:
            ordered: Whether they come behind all that is queued on the caller's
                current stream. Its failures are then told here too, as what is copied
                may be wrong.

        Raises:
            RuntimeError: A copy failed; none is under way any more.
            InFlightError: Not even that is known.
        """
        own = self._take()
        drained = False
        try:
            try:
                if ordered:
                    own.stream.wait_stream(torch.rbln.current_stream(self._device))
                    # A failure of what they have to wait for is one of theirs.
                    own.marks.add()
                with torch.rbln.stream(own.stream):
                    yield Copies(own.marks)
            except BaseException:
                own.drain()
                drained = True
                raise
            failure = own.drain()
            drained = True
            if failure is not None:
                raise failure
        finally:
            self._give_back(own, drained)

    def _take(self) -> _OwnStream:
        with self._returned:
            while True:
                if self._idle:
                    return self._idle.pop()
                if self._to_make:
                    made = _OwnStream(self._device)
                    self._to_make -= 1
                    return made
                if not self._usable:
                    raise RuntimeError(
                        f"no stream of {self._device} is left that ends its copies; "
                        "the device is lost, restart the process"
                    )
                self._returned.wait()

    def _give_back(self, own: _OwnStream, drained: bool) -> None:
        with self._returned:
            if drained:
                self._idle.append(own)
            else:
                self._usable -= 1
                logger.error(
                    "Copies on a stream of %s do not end; it is not used again, nor "
                    "is the memory of its last transfer",
                    self._device,
                )
            # All: where no stream is usable any more, everybody must learn of it.
            self._returned.notify_all()


@cache
def streams_of(device: torch.device) -> DeviceStreams:
    """Return the streams of a device, the same ones for the whole process.

    Args:
        device: With its index.
    """
    return DeviceStreams(device)


class Copies:
    """Issues the copies of one transfer, inside of its ``with`` block.

    Args:
        marks: Of the transfer's stream, which is the current one.
    """

    def __init__(self, marks: _Marks) -> None:
        self._marks = marks

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Event:
        """Copy without waiting for it.

        Args:
            target: Gets the elements.
            source: Has them; unchanged until the copy is done.

        Returns:
            An event behind the copy, of use until the transfer ends.

        Raises:
            RuntimeError: It could not be issued, or one before it failed.
        """
        target.copy_(source, non_blocking=True)
        return self._marks.add()


class _Marks:
    """Events on a stream, one behind each thing that may fail.

    With a single one behind all, a thread that waits for the whole device meanwhile
    could be told of a failure in the transfer's place: what is queued next moves the
    stream past it.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        # Used again in the next transfer: there may be thousands.
        self._events: list[torch.Event] = []
        self._used = 0

    def add(self) -> torch.Event:
        """Record an event behind what is queued."""
        if self._used == len(self._events):
            self._events.append(torch.rbln.Event())
        event = self._events[self._used]
        event.record(self._stream)
        self._used += 1
        return event

    def wait(self) -> None:
        """Wait for all of them, and forget them.

        Raises:
            RuntimeError: What stands before one of them failed.
        """
        used, self._used = self._events[: self._used], 0
        if used:
            used[-1].synchronize()
        for event in used[:-1]:
            if not event.query():
                event.synchronize()


class _OwnStream:
    """A stream that is idle, and owes no report of a failure, between transfers."""

    # Callers may be in it or not, and what is made in it can be written nowhere else.
    @torch.inference_mode()
    def __init__(self, device: torch.device) -> None:
        self.stream: Any = torch.rbln.Stream(device=device)
        self.marks = _Marks(self.stream)
        self._probe = torch.empty(2, dtype=torch.uint8, device=device)
        torch.rbln.bind_device_memory(self._probe)

    @torch.inference_mode()
    def drain(self) -> RuntimeError | None:
        """Wait until nothing is under way.

        Returns:
            The first failure on the way, if there was one.

        Raises:
            InFlightError: It cannot be told.
        """
        first: RuntimeError | None = None
        try:
            self.marks.wait()
        except RuntimeError as error:
            first = error
        for _ in range(_MOST_WAITS):
            try:
                if first is not None:
                    # A failure is told again and again until something new is queued.
                    with torch.rbln.stream(self.stream):
                        self._probe[:1].copy_(self._probe[1:], non_blocking=True)
                # A wait that succeeds is the only proof: one that fails may have
                # ended early.
                self.stream.synchronize()
                return first
            except RuntimeError as error:
                first = first or error
        raise InFlightError(
            f"copies on {self.stream} may be under way still: {first}"
        ) from first
