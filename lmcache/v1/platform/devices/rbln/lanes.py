# SPDX-License-Identifier: Apache-2.0
"""Lanes: the streams that transfers have for themselves.

torch-rbln has 32 streams of a device and gives them out round and round, also those
that somebody uses. So transfers draw theirs here, once, and keep them.
"""

# Future
from __future__ import annotations

# Standard
from collections import defaultdict
from collections.abc import Sequence
from typing import Any
import contextlib
import functools

# Third Party
import torch

# First Party
from lmcache.logging import init_logger
from lmcache.v1.platform.devices.rbln.native import kv_transpose

logger = init_logger(__name__)

#: Streams of a device that torch-rbln gives out.
STREAM_POOL = 32
_PROBE_BYTES = 64


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

    def drain(self) -> bool:
        """Wait until nothing is in flight; return whether that is so."""
        return self.stream is None or kv_transpose().drain(self.stream, self.probe)

    def prepare(self, device: torch.device) -> None:
        """Make its probe, if it has none yet."""
        if self.probe is None and self.stream is not None:
            self.probe = make_probe(device)


class LanePool:
    """The lanes of every device. For one thread at a time.

    Attributes:
        by_device: All lanes that were made.
    """

    def __init__(self) -> None:
        self.by_device: dict[torch.device, list[Lane]] = defaultdict(list)
        # Streams that callers were seen to use.
        self._callers: dict[torch.device, set[int]] = defaultdict(set)
        # Devices of which they have had every stream that is in no lane.
        self._all_had: set[torch.device] = set()

    def see_caller(self, device: torch.device) -> None:
        """Keep what is now current out of lanes: callers may wait for it."""
        if supports_async_copies():
            current = torch_rbln().current_stream(device).stream_id
            self._callers[device].add(current)

    def take(self, device: torch.device, taken: Sequence[Lane | None]) -> Lane:
        """Return a lane that is none of some, with a stream of its own."""
        lanes = self.by_device[device]
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
            # Where callers have had all, lanes and what is now current are still few.
            current = torch_rbln().current_stream(device).stream_id
            if device not in self._all_had:
                lane.stream = _draw(device, ours | callers)
                if lane.stream is None:
                    self._all_had.add(device)
            if lane.stream is None or lane.stream.stream_id == current:
                lane.stream = _draw(device, ours | {current})
        return lane


def _draw(device: torch.device, avoided: set[int]) -> Any:
    """Return a stream of a device that is none of some, or None."""
    for _ in range(STREAM_POOL):
        stream = torch_rbln().Stream(device)
        if stream.stream_id not in avoided:
            return stream
    return None


def make_probe(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a few bytes of pinned and of bound device memory."""
    # Inference tensors can't be written by who asks outside of inference mode.
    with torch.inference_mode(False):
        host = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
        remote = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)
        torch_rbln().bind_device_memory(remote)
    return host, remote
