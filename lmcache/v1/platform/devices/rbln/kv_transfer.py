# SPDX-License-Identifier: Apache-2.0
"""Byte movement between paged RBLN KV blocks and token-major host chunks.

Device copies run asynchronously on the current stream of the calling thread, through
parts of pinned buffers: while one part is transposed on the host, the copies of the
next ones are in flight. A part is read on the host, or used again, only after the
event recorded behind its copies has completed. When a transfer returns, every copy it
issued is complete in both directions. ``lmcache.kv_transpose`` does this in one call;
the Python pipeline here does the same where the extension is missing.

vLLM allocates its KV cache in inference mode. Such tensors may only be written inside
it, and it does not reach LMCache's threads: whatever writes here enters it.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Sequence

# Third Party
import numpy as np
import torch

# First Party
from lmcache.v1.platform.devices.rbln import staging
from lmcache.v1.platform.devices.rbln.copy_costs import (
    HARDWARE_COSTS,
    CopyCosts,
)
from lmcache.v1.platform.devices.rbln.device_copies import (
    ChunkRows,
    DeviceCopies,
    DeviceStagedCopies,
    DirectCopies,
    Regions,
)
from lmcache.v1.platform.devices.rbln.device_staging import (
    device_pool,
    known_costs,
    measured_costs,
)
from lmcache.v1.platform.devices.rbln.host_transpose import (
    ELEMENT_BYTES,
    TorchTransposition,
    copy_bits,
    transpose_threads,
)
from lmcache.v1.platform.devices.rbln.kv_layout import KVGeometry, chunk_view
from lmcache.v1.platform.devices.rbln.kv_moves import Moves
from lmcache.v1.platform.devices.rbln.kv_plan import (
    Piece,
    chunk_slice,
    device_slice,
)
from lmcache.v1.platform.devices.rbln.native import kv_transpose
from lmcache.v1.platform.devices.rbln.ring import (
    Ring,
    Staged,
    copy_straight,
    supports_async_copies,
)

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
        Elements that fit a staging buffer. Caches in host memory have no
        staging and hence no limit but their own size.

    Raises:
        ValueError: If elements are of no width that host copies know, or not even one
            token of one head fits.
    """
    if geometry.dtype.itemsize not in ELEMENT_BYTES:
        raise ValueError(
            f"the KV cache is {geometry.dtype}, wanted elements of "
            f"{', '.join(map(str, ELEMENT_BYTES))} bytes"
        )
    if geometry.device.type == "cpu":
        return (
            geometry.num_blocks
            * geometry.num_planes
            * geometry.num_heads
            * (geometry.block_size * geometry.head_size)
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

    Args:
        geometry: Geometry of the KV cache.
        layers: The layers that ``geometry`` describes.
        chunks: Host memory, ``[2, L, T, NH*HS]`` each, or ``[L, T, HS]`` for MLA.
        pieces: What to copy in every layer, ordered by chunk; each element at most
            once.
        to_host: Whether to gather.

    Raises:
        RuntimeError: If a device copy fails. No copy is then in flight, and the
            contents of the chunks, or of the blocks named by ``pieces`` if those were
            written, are undefined.
    """
    if not pieces:
        return
    move = _copy_on_host if geometry.device.type == "cpu" else _transfer
    move(geometry, layers, chunks, pieces, to_host)


@torch.inference_mode()
def _copy_on_host(
    geometry: KVGeometry,
    layers: Sequence[torch.Tensor],
    chunks: Sequence[torch.Tensor],
    pieces: Sequence[Piece],
    to_host: bool,
) -> None:
    """Copy pieces of a cache in host memory, without staging."""
    views = [chunk_view(chunk, geometry) for chunk in chunks]
    for piece in pieces:
        for index, layer in enumerate(layers):
            blocks = device_slice(geometry.block_view(layer), piece)
            window = chunk_slice(views[piece.chunk], piece, index)
            pair = (window, blocks)
            copy_bits(*(pair if to_host else pair[::-1]))


def _transfer(
    geometry: KVGeometry,
    layers: Sequence[torch.Tensor],
    chunks: Sequence[torch.Tensor],
    pieces: Sequence[Piece],
    to_host: bool,
) -> None:
    """Copy pieces between a device and the host."""
    moves = Moves(geometry, pieces)
    regions = Regions(geometry, layers, moves)
    may_collect = _may_collect(moves)
    if not may_collect and _copy_straight(geometry, regions, chunks, moves, to_host):
        return
    with Ring(geometry.device) as ring:
        collector = _choose_collector(ring, regions, moves, may_collect)
        batch_bytes = ring.part_bytes
        if collector is None:
            # The host has a batch to transpose while the next ones are copied.
            share = max(MIN_BATCH_BYTES, moves.total_bytes // MIN_BATCHES)
            batch_bytes = min(batch_bytes, share)
        native = kv_transpose()
        if native is not None:
            ring.begin_copies()
            # It enters inference mode by itself, in less time.
            native.transfer(
                to_host=to_host,
                layers=layers,
                strides=geometry.strides[:-1],
                heads=geometry.num_heads,
                staging=ring.buffers,
                part_bytes=ring.part_bytes,
                parts=ring.parts,
                collector=collector,
                batch_bytes=batch_bytes,
                chunks=chunks,
                pieces=np.array(moves.pieces, dtype=np.int64),
                non_blocking=ring.asynchronous,
                threads=transpose_threads(),
            )
        else:
            copies: DeviceCopies = (
                DirectCopies(regions, ring.asynchronous)
                if collector is None
                else DeviceStagedCopies(regions, collector)
            )
            host = TorchTransposition([chunk_view(chunk, geometry) for chunk in chunks])
            _run_pipeline(ring, copies, host, moves, moves.pack(batch_bytes), to_host)


@torch.inference_mode()
def _run_pipeline(
    ring: Ring,
    copies: DeviceCopies,
    host: TorchTransposition,
    moves: Moves,
    batches: Sequence[range],
    to_host: bool,
) -> None:
    """Stage batch after batch, as ``lmcache.kv_transpose.transfer`` does natively."""

    def finish() -> Staged:
        part = ring.oldest()
        part.wait()
        if to_host:
            host.gather(part.buffer, moves.tiles_of(part.batch))
        return part

    unused = ring.make_parts(moves.dtype)
    ring.begin_copies()
    for batch in batches:
        part = next(unused, None) or finish()
        ring.stage(part, batch)
        if to_host:
            copies.to_host(part.elements(moves), batch)
        else:
            host.scatter(part.buffer, moves.tiles_of(batch))
            copies.to_device(part.elements(moves), batch)
        part.record()
    while ring.in_flight():
        finish()


def _choose_collector(
    ring: Ring, regions: Regions, moves: Moves, may_collect: bool
) -> torch.Tensor | None:
    """Choose the cheaper copies, and divide the ring's buffers for direct ones.

    Returns:
        Device memory to collect pieces in, or None where direct copies are cheaper.
    """
    known = known_costs(regions.device)
    may_collect = may_collect and (known is None or _collecting_pays(known, moves))
    if ring.asynchronous and may_collect:
        buffer = _borrow_collector(ring, regions, moves)
        if buffer is not None:
            return buffer
    # Each piece must fit a part.
    aligned = -(-moves.largest_bytes // _ALIGNMENT) * _ALIGNMENT
    part_bytes = min(max(staging.PART_BYTES, aligned), staging.BUFFER_BYTES)
    ring.divide(part_bytes, staging.PARTS)
    return None


@torch.inference_mode()
def _borrow_collector(
    ring: Ring, regions: Regions, moves: Moves
) -> torch.Tensor | None:
    """Borrow device memory to collect pieces in; None if it is not there or no use."""
    buffer = ring.borrow_device_buffer(device_pool(regions.device, regions.dtype))
    if buffer is None:
        return None
    ring.begin_copies()
    costs = measured_costs(regions.first, ring.buffers[0], buffer, ring.is_alone)
    # It has waited for its copies.
    ring.end_copies()
    pays = costs is not None and _collecting_pays(costs, moves)
    return buffer if pays else None


def _collecting_pays(costs: CopyCosts, moves: Moves) -> bool:
    """Return whether pieces are better collected in device memory."""
    num_bytes, pieces = moves.total_bytes, moves.count
    collected = costs.device_staged_us(num_bytes, pieces, staging.BUFFER_BYTES)
    return collected < costs.direct_us(num_bytes, pieces)


def _copy_straight(
    geometry: KVGeometry,
    regions: Regions,
    chunks: Sequence[torch.Tensor],
    moves: Moves,
    to_host: bool,
) -> bool:
    """Let the device copy to and from chunks by itself; return whether it could.

    It can where a piece is contiguous in its chunk too, as MLA's are, and the chunk is
    pinned. Through pageable memory the link is slower than by way of staging.
    """
    if geometry.num_planes * geometry.num_heads > 1 or not supports_async_copies():
        return False
    with torch.inference_mode():
        rows = ChunkRows([chunk_view(chunk, geometry) for chunk in chunks])
        if not (rows.dense and rows.pinned):
            return False
        pair = (rows.of(moves), regions.of(moves.all))
        targets, sources = pair if to_host else pair[::-1]
        copy_straight(geometry.device, targets, sources, chunks)
    return True


def _may_collect(moves: Moves) -> bool:
    """Return whether collecting pays, or may do where costs are not measured yet."""
    return moves.count >= MIN_PIECES_TO_COLLECT and _collecting_pays(
        HARDWARE_COSTS, moves
    )
