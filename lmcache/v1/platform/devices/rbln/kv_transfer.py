# SPDX-License-Identifier: Apache-2.0
"""Byte movement between paged RBLN KV blocks and token-major host chunks.

``lmcache.kv_transpose`` moves them in one call: while one part of staging is transposed
on the host, the copies of the next ones are in flight. Here it is chosen how, and the
staging is leased. The copies are on the lease's own stream, behind what the caller's
current stream had to do, so that no other thread is told of their failures. When a
transfer returns, or fails, none of its copies is in flight.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable, Sequence
import functools

# Third Party
import numpy as np
import torch

# First Party
from lmcache.logging import init_logger
from lmcache.v1.platform.devices.rbln import copy_costs, settings, staging
from lmcache.v1.platform.devices.rbln.block_transfer import StillInFlightError
from lmcache.v1.platform.devices.rbln.copy_costs import HARDWARE_COSTS, CopyCosts
from lmcache.v1.platform.devices.rbln.kv_layout import KVGeometry
from lmcache.v1.platform.devices.rbln.kv_plan import Piece
from lmcache.v1.platform.devices.rbln.native import kv_transpose
from lmcache.v1.platform.devices.rbln.staging import Lease

logger = init_logger(__name__)

#: Element widths, in bytes, that transfers can move.
ELEMENT_BYTES = (1, 2, 4, 8)
#: Buffers of a transfer that collects: one is copied while one is transposed.
COLLECTED_BUFFERS = 2
#: Copies that are large anyway share one buffer in so many parts of this many bytes, or
#: of the largest piece. They stay in cache, so the host copy that follows a device copy
#: reads from there, and it starts early.
PARTS = 4
PART_BYTES = 1 << 20
#: With fewer pieces than this a transfer's time is not in their fixed cost.
MIN_PIECES_TO_COLLECT = 16
#: A transfer is cut into this many batches at least, unless they get too small or its
#: pieces are larger.
MIN_BATCHES = 24
MIN_BATCH_BYTES = 256 << 10
#: Parts of a buffer start at multiples of this many bytes.
_ALIGNMENT = 64


def max_piece_elements(geometry: KVGeometry) -> int:
    """Return the largest piece that a transfer of ``geometry`` can stage.

    Args:
        geometry: Geometry of the KV cache.

    Returns:
        Elements that fit a staging buffer.

    Raises:
        ValueError: If elements are of no width that host copies know, or not even one
            token of one head fits.
    """
    if geometry.dtype.itemsize not in ELEMENT_BYTES:
        raise ValueError(
            f"the KV cache is {geometry.dtype}, wanted elements of "
            f"{', '.join(map(str, ELEMENT_BYTES))} bytes"
        )
    elements = staging.BUFFER_BYTES // geometry.dtype.itemsize
    if geometry.head_size > elements:
        raise ValueError(
            f"head size {geometry.head_size} of {geometry.dtype} does not fit a "
            f"staging buffer of {staging.BUFFER_BYTES} bytes"
        )
    return elements


def transfer(
    geometry: KVGeometry,
    layers: Sequence[torch.Tensor],
    chunks: Sequence[torch.Tensor],
    pieces: Sequence[Piece],
    to_host: bool,
) -> None:
    """Gather pieces of paged blocks into chunks (D2H), or scatter chunks (H2D).

    A copy that never ends is waited for without a limit, with the GIL released: its
    memory can't be given back, and only the driver can tell that it is lost.

    Args:
        geometry: Geometry of the KV cache.
        layers: The layers that ``geometry`` describes.
        chunks: Host memory, ``[2, L, T, NH*HS]`` each, or ``[L, T, HS]`` for MLA;
            that one may also be on the layers' device.
        pieces: What to copy in every layer, ordered by chunk; each element at most
            once.
        to_host: Whether to gather.

    Raises:
        ValueError: If a layer or chunk has less memory than its shape needs. Nothing
            was copied.
        RuntimeError: If a device copy fails, or what the caller's stream had to do
            before. The contents of the chunks, or of the blocks named by ``pieces`` if
            those were written, are undefined. No copy is in flight then.
        StillInFlightError: The same, but the device can't be waited for any more.
    """
    if not pieces:
        return
    move = functools.partial(
        kv_transpose().transfer,
        to_host=to_host,
        layers=layers,
        strides=geometry.strides[:-1],
        heads=geometry.num_heads,
        chunks=chunks,
        pieces=np.array(pieces, dtype=np.int64),
        threads=settings.transpose_threads(),
    )
    sizes = _Sizes(geometry, pieces)
    if geometry.device.type == "cpu":
        _move_on_host(move, sizes)
        return
    known = copy_costs.known_costs(geometry.device)
    on_device = chunks[0].device == geometry.device
    may_collect = (
        not on_device and sizes.may_collect(known) and staging.supports_async_copies()
    )
    in_place = not may_collect and _can_copy_in_place(geometry, chunks)
    portions = sizes.direct()
    # One buffer has parts enough, or a second one does instead.
    buffers = 1 if portions["parts"] > 1 else 2
    lease = Lease(0 if in_place else COLLECTED_BUFFERS if may_collect else buffers)
    arena = staging.arena()
    try:
        arena.acquire(lease, geometry.device)
        collector = None
        if may_collect:
            collector = _choose_collector(lease, layers[0], sizes)
        if collector is not None:
            portions, buffers = sizes.collected(), COLLECTED_BUFFERS
        _run(move, lease, buffers, portions, collector, in_place, to_host)
    finally:
        # Before any call: an interrupt may strike there.
        lease.ended = True
        arena.release(lease)


class _Sizes:
    """How much a transfer moves, and in which portions.

    Args:
        geometry: Geometry of the KV cache.
        pieces: What to copy in every layer.
    """

    def __init__(self, geometry: KVGeometry, pieces: Sequence[Piece]) -> None:
        sizes = [piece.elements(geometry.head_size) for piece in pieces]
        self.count = len(sizes) * geometry.num_layers
        self.total = sum(sizes) * geometry.num_layers * geometry.dtype.itemsize
        self.largest = max(sizes) * geometry.dtype.itemsize

    def direct(self) -> dict[str, int]:
        """Return parts and batches of direct copies: each piece fits a part."""
        aligned = -(-self.largest // _ALIGNMENT) * _ALIGNMENT
        part_bytes = min(max(PART_BYTES, aligned), staging.BUFFER_BYTES)
        # The host has a batch to transpose while the next ones are copied.
        share = max(MIN_BATCH_BYTES, self.total // MIN_BATCHES)
        return {
            "part_bytes": part_bytes,
            "parts": min(PARTS, staging.BUFFER_BYTES // part_bytes),
            "batch_bytes": min(part_bytes, share),
        }

    def collected(self) -> dict[str, int]:
        """Return the same for collected copies: as large as can be."""
        size = staging.BUFFER_BYTES
        return {"part_bytes": size, "parts": 1, "batch_bytes": size}

    def may_collect(self, known: CopyCosts | None) -> bool:
        """Return whether collecting pays, or may do where costs are not known."""
        return self.count >= MIN_PIECES_TO_COLLECT and self.collecting_pays(
            known or HARDWARE_COSTS
        )

    def collecting_pays(self, costs: CopyCosts) -> bool:
        """Return whether pieces are better collected in device memory."""
        collected = costs.device_staged_us(self.total, self.count, staging.BUFFER_BYTES)
        return collected < costs.direct_us(self.total, self.count)


def _run(
    move: Callable[..., None],
    lease: Lease,
    buffers: int,
    portions: dict[str, int],
    collector: torch.Tensor | None,
    in_place: bool,
    to_host: bool,
) -> None:
    """Move everything with the staging of a lease, up to so many buffers of it."""
    not_drained = kv_transpose().NotDrained
    lease.busy = True
    drained = True
    try:
        move(
            staging=lease.buffers[:buffers],
            collector=collector,
            stream=lease.stream,
            probe=lease.probe,
            in_place=in_place,
            **portions,
        )
    except not_drained as exc:
        drained = False
        accesses = "read" if to_host else "write"
        memory = "blocks of the KV cache"
        if in_place:
            memory += " and the memory of the chunks"
            accesses = "access"
        raise _still_in_flight(accesses, memory, exc) from exc
    finally:
        # In any other case the native call has waited for its copies.
        lease.busy = not drained


def _still_in_flight(
    accesses: str, memory: str, failure: Exception
) -> StillInFlightError:
    """Return, and log, what a transfer fails with that could not be drained.

    Args:
        accesses: What its copies may still do.
        memory: The memory that they do it to; its staging apart.
        failure: Why it failed.
    """
    error = StillInFlightError(
        "RBLN copies of a failed transfer may still be in flight: the device does not "
        f"answer any more and may still {accesses} {memory}. Do not reuse that memory; "
        "staging is used again when the device is known to be idle. If it never is, "
        f"the device is lost: restart the process. The failure was: {failure}"
    )
    logger.error("%s", error)
    return error


def _move_on_host(move: Callable[..., None], sizes: _Sizes) -> None:
    """Move pieces of a cache in host memory: the same way, and synchronous."""
    portions = sizes.direct()
    # Not more than there is: tests move little, and often.
    part_bytes = max(sizes.largest, min(portions["part_bytes"], sizes.total))
    portions |= {"part_bytes": part_bytes, "parts": 1, "batch_bytes": part_bytes}
    buffer = torch.empty(part_bytes, dtype=torch.uint8)
    move(staging=[buffer], collector=None, stream=None, **portions)


def _can_copy_in_place(geometry: KVGeometry, chunks: Sequence[torch.Tensor]) -> bool:
    """Return whether the device can copy to and from chunks by itself.

    It can where a piece is contiguous in its chunk too, as MLA's are, and the chunk is
    pinned or the device's own. Through pageable memory the link is slower than by way
    of staging.
    """
    if geometry.num_planes * geometry.num_heads > 1:
        return False
    return staging.supports_async_copies() and all(
        (chunk.stride(-2) == geometry.head_size or chunk.shape[-2] == 1)
        and (chunk.device == geometry.device or chunk.is_pinned())
        for chunk in chunks
    )


@torch.inference_mode()
def _choose_collector(
    lease: Lease, layer: torch.Tensor, sizes: _Sizes
) -> torch.Tensor | None:
    """Return device memory to collect pieces in; None if there is none, or no use."""
    assert lease.lane is not None
    key = layer.device, layer.dtype
    buffer = lease.lane.collectors.get(key)
    if buffer is None:
        try:
            buffer = staging.make_collector(*key)
        except RuntimeError as exc:
            staging.warn_once(
                "Small pieces of the KV cache are copied one by one and slower, "
                "without device memory to collect them in: %s",
                exc,
            )
            return None
        lease.lane.collectors[key] = buffer
    lease.busy = True
    # Dense in every layout.
    head = layer.as_strided((layer.shape[-2] * layer.shape[-1],), (1,))
    try:
        costs = copy_costs.measured_costs(head, lease.buffers[0], buffer, lease.stream)
    except BaseException as exc:
        staging.drain(lease)
        if lease.busy and isinstance(exc, RuntimeError):
            raise _still_in_flight("read", "blocks of the KV cache", exc) from exc
        raise
    # It has waited for its copies.
    lease.busy = False
    return buffer if costs is not None and sizes.collecting_pays(costs) else None
