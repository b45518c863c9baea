# SPDX-License-Identifier: Apache-2.0
"""Runs planned transfers: chooses how, leases staging, makes the native call.

``lmcache.kv_transpose`` moves the bytes: while one part of staging is transposed on the
host, the copies of the next ones are in flight. They are on the lease's own stream,
behind what the caller's current stream had to do, so that no other thread is told of
their failures. When a transfer returns, or fails, none of its copies is in flight.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable
from typing import Any, TypeVar

# Third Party
import torch

# First Party
from lmcache.logging import init_logger
from lmcache.v1.platform.devices.rbln import copy_costs, lanes, settings, staging
from lmcache.v1.platform.devices.rbln.native import kv_transpose
from lmcache.v1.platform.devices.rbln.staging import Lease

logger = init_logger(__name__)

#: Segments that are collected need two buffers: one is copied while one is transposed.
#: Others share one in parts of this many bytes, or of the largest segment.
COLLECTED_BUFFERS = 2
PART_BYTES = 1 << 20
#: With fewer segments than this a transfer's time is not in their fixed cost.
MIN_SEGMENTS_TO_COLLECT = 16

_T = TypeVar("_T")


class StillInFlightError(RuntimeError):
    """A transfer failed, and its copies may use its memory still: don't reuse that."""


def transfer(plan: Any) -> None:
    """Move what is planned between layers and chunks.

    A copy that never ends is waited for without a limit, with the GIL released: its
    memory can't be given back, and only the driver can tell that it is lost.

    Args:
        plan: The native plan.

    Raises:
        StillInFlightError: The device can't be waited for any more.
        RuntimeError: If a device copy fails, or what the caller's stream had to do
            before. What was written is undefined. No copy is in flight.
    """
    if not plan.segments:
        return
    device = plan.device
    if device.type == "cpu":
        # Not more than there is: tests move little, and often.
        size = max(plan.largest_bytes, min(PART_BYTES, plan.bytes))
        used = [] if plan.on_device else [torch.empty(size, dtype=torch.uint8)]
        _run(plan, used, None, Lease(device, 0))
        return
    asynchronous = lanes.supports_async_copies()
    may_collect = asynchronous and not plan.on_device and _may_collect(plan)
    in_place = plan.on_device or asynchronous and plan.in_place and not may_collect
    # One buffer has parts enough, or a second one does instead.
    has_parts = max(PART_BYTES, plan.largest_bytes) <= staging.BUFFER_BYTES // 2
    buffers = 1 if has_parts else 2
    want = 0 if in_place else COLLECTED_BUFFERS if may_collect else buffers
    lease = Lease(device, want, plan)
    arena = staging.arena()
    try:
        arena.acquire(lease)
        collector = _choose_collector(plan, lease) if may_collect else None
        used = lease.buffers if collector is not None else lease.buffers[:buffers]
        writes = not plan.to_chunks
        _guarded(lease, lambda: _run(plan, used, collector, lease), writes, in_place)
    finally:
        # Before any call: an interrupt may strike there.
        lease.ended = True
        arena.release(lease)


def _run(plan: Any, buffers: list[torch.Tensor], collector: Any, lease: Lease) -> None:
    """Run a plan with some buffers and the lane of a lease."""
    lane = lease.lane
    kv_transpose().run(
        plan,
        buffers,
        collector,
        lane and lane.stream,
        lane and lane.probe,
        settings.transpose_threads(),
    )


def _guarded(
    lease: Lease, copies: Callable[[], _T], writes: bool = False, in_place: bool = False
) -> _T:
    """Make a native call that copies. The lease is busy after it if not drained."""
    not_drained = kv_transpose().NotDrained
    lease.busy = True
    drained = True
    try:
        return copies()
    except not_drained as exc:
        drained = False
        accesses = "write" if writes else "read"
        memory = "blocks of the KV cache"
        if in_place:
            accesses, memory = "access", f"{memory} and the memory of the chunks"
        error = StillInFlightError(
            "RBLN copies of a failed transfer may still be in flight: the device does "
            f"not answer any more and may still {accesses} {memory}. Do not reuse that "
            "memory; staging is used again when the device is known to be idle. If it "
            f"never is, the device is lost: restart the process. The failure was: {exc}"
        )
        logger.error("%s", error)
        raise error from exc
    finally:
        # In any other case the native call has waited for its copies.
        lease.busy = not drained


def _collecting_pays(plan: Any, descriptor_us: float) -> bool:
    return copy_costs.collecting_pays(
        plan.bytes, plan.segments, staging.BUFFER_BYTES, descriptor_us
    )


def _may_collect(plan: Any) -> bool:
    """Return whether collecting pays, or may do where costs are not known."""
    known = copy_costs.known_us(plan.device)
    return plan.segments >= MIN_SEGMENTS_TO_COLLECT and _collecting_pays(
        plan, copy_costs.HARDWARE_DESCRIPTOR_US if known is None else known
    )


def make_collector(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Make device memory to collect segments in, as large as a staging buffer."""
    elements = staging.BUFFER_BYTES // dtype.itemsize
    buffer = torch.empty(elements, dtype=dtype, device=device)
    lanes.torch_rbln().bind_device_memory(buffer)
    return buffer


@torch.inference_mode()
def _choose_collector(plan: Any, lease: Lease) -> torch.Tensor | None:
    """Return device memory to collect segments in; None if there is none, or no use."""
    lane = lease.lane
    assert lane is not None
    buffer = lane.collectors.get(plan.dtype)
    if buffer is None:
        try:
            buffer = make_collector(lease.device, plan.dtype)
        except RuntimeError as exc:
            staging.warn_once(
                "Small pieces of the KV cache are copied one by one and slower, "
                "without device memory to collect them in: %s",
                exc,
            )
            return None
        lane.collectors[plan.dtype] = buffer

    def copy_times() -> tuple[float, float]:
        return kv_transpose().copy_times(
            plan, lease.buffers, buffer, lane.stream, lane.probe
        )

    cost_us = copy_costs.measured_us(lease.device, lambda: _guarded(lease, copy_times))
    return buffer if cost_us is not None and _collecting_pays(plan, cost_us) else None
