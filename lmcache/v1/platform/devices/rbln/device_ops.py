# SPDX-License-Identifier: Apache-2.0
"""RBLN device operations: validate a block transfer, then move it.

Everything that can be wrong with a call is refused here, before the first byte
moves. All other operations are LMCache's torch baseline.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, TypeVar
import operator

# Third Party
import numpy as np
import torch

# First Party
from lmcache.lmcache_native import EngineKVFormat, TransferDirection
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.devices.rbln import kv_transfer
from lmcache.v1.platform.devices.rbln.kv_layout import KVGeometry, resolve_geometry
from lmcache.v1.platform.devices.rbln.kv_plan import plan_pieces
from lmcache.v1.platform.devices.rbln.staging import torch_rbln
from lmcache.v1.platform.ops_types import PageBufferShapeDesc


#: A native enum; what it offers is not known to type checkers.
_Enum = TypeVar("_Enum", bound=Any)

#: What a shape descriptor says of the layers.
_DESCRIBED = (
    "bs",
    "nb",
    "nl",
    "nh",
    "hs",
    "kv_size",
    "element_size",
    "block_stride_elems",
)


class RblnDeviceOps(DeviceOps):
    """Operations on RBLN tensors. Any number of threads may call them at once."""

    device_type: ClassVar[str] = "rbln"

    #: Every transfer returns after its last device copy has completed, so LMCache may
    #: free host memory without synchronizing a device that it may not even hold.
    transfers_complete_on_return: ClassVar[bool] = True

    def multi_layer_block_kv_transfer(
        self,
        paged_buffer_ptrs_tensor: torch.Tensor | list[torch.Tensor],
        lmcache_objects_ptrs: list[int] | list[torch.Tensor],
        block_ids: torch.Tensor | list[int],
        device: torch.device | str,
        direction: TransferDirection,
        shape_desc: PageBufferShapeDesc,
        lmcache_chunk_size: int,
        engine_kv_format: EngineKVFormat,
        skip_prefix_n_blocks: int,
    ) -> None:
        """Gather paged KV blocks into chunks (D2H) or scatter chunks into blocks (H2D).

        Copies are issued on the calling thread's current stream of ``device`` and are
        complete when the call returns.

        Args:
            paged_buffer_ptrs_tensor: The KV cache, one tensor per layer:
                ``[NB, 2, NH, 1, BS, HS]`` (or ``[NB, 2, NH, BS, HS]``),
                ``[2, NB, NH, 1, BS, HS]`` or ``[NB, BS, HS]``, as
                ``engine_kv_format`` says. Pointers are not accepted.
            lmcache_objects_ptrs: Host chunks of ``lmcache_chunk_size`` tokens,
                ``[2, L, T, NH*HS]``, or ``[L, T, HS]`` for MLA, in the KV cache's
                dtype. Only the last may hold fewer tokens, and it may end inside a
                block.
            block_ids: Block ids of all chunks in token order, as many as cover their
                tokens.
            device: Device that holds the layers.
            direction: ``D2H`` or ``H2D``.
            shape_desc: LMCache's description of the KV cache; must agree with it.
            lmcache_chunk_size: Tokens per chunk, a multiple of the block size.
            engine_kv_format: Layout of the layers.
            skip_prefix_n_blocks: Leading blocks of the call, with their tokens, that
                are neither read nor written.

        Raises:
            ValueError: If any argument is not as above, or H2D names a block twice.
                No byte has moved then.
            RuntimeError: If the device fails during the transfer.
        """
        layers = _require_tensors(paged_buffer_ptrs_tensor, "KV layers")
        chunks = _require_tensors(lmcache_objects_ptrs, "chunks")
        chunk_size = _whole_number(lmcache_chunk_size, "lmcache_chunk_size")
        skip_blocks = _whole_number(skip_prefix_n_blocks, "skip_prefix_n_blocks")
        kv_format = _enum(EngineKVFormat, engine_kv_format, "engine_kv_format")
        gathers = (
            _enum(TransferDirection, direction, "direction") == TransferDirection.D2H
        )
        geometry = resolve_geometry(layers, kv_format)
        _require_device(geometry, device)
        _require_shape_desc(geometry, shape_desc)
        _require_chunks(geometry, chunks, chunk_size)
        chunk_blocks = _split_block_ids(geometry, chunks, block_ids, chunk_size)
        if skip_blocks < 0:
            raise ValueError(
                f"skip_prefix_n_blocks={skip_blocks} is negative; pass 0 to skip "
                "nothing"
            )
        if gathers:
            _require_writable(chunks)
        else:
            _require_distinct(chunk_blocks, skip_blocks)

        pieces = list(
            plan_pieces(
                geometry,
                [_tokens(chunk) for chunk in chunks],
                chunk_blocks,
                skip_blocks,
                kv_transfer.max_piece_elements(geometry),
            )
        )
        kv_transfer.transfer(geometry, layers, chunks, pieces, to_host=gathers)

    def copy_blocks_on_device(
        self,
        layers: Sequence[torch.Tensor],
        chunks: Sequence[torch.Tensor],
        block_ids: Sequence[Sequence[int]],
        direction: TransferDirection,
        engine_kv_format: EngineKVFormat,
        skip_blocks: Sequence[int],
    ) -> None:
        """Copy whole blocks between the KV cache and chunks on the same device.

        Copies are issued behind what the calling thread's current stream has to do, and
        are complete when the call returns.

        Args:
            layers: The KV cache, as :meth:`multi_layer_block_kv_transfer` takes it.
            chunks: Device memory of the KV cache's dtype, with one dense axis. A chunk
                of ``n`` blocks has them as they lie in the KV cache, layer by layer:
                ``[L, n, 2, NH, BS, HS]``, ``[L, 2, n, NH, BS, HS]`` or
                ``[L, n, BS, HS]``.
            block_ids: Block ids of each chunk, in its order.
            direction: ``D2H`` into chunks, or ``H2D`` into blocks.
            engine_kv_format: Layout of the layers.
            skip_blocks: For each chunk how many leading blocks are left alone.

        Raises:
            ValueError: If any argument is not as above, or H2D names a block twice.
                No byte has moved then.
            StillInFlightError: The device can't be waited for after a failure.
            RuntimeError: If the device fails during the transfer.
        """
        geometry = resolve_geometry(layers, engine_kv_format)
        parts = list(layers)
        if engine_kv_format == EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS:
            parts = [plane for layer in parts for plane in layer]
        # Without heads and planes, so that whole blocks are contiguous.
        shape = (geometry.num_blocks, geometry.block_size, -1)
        parts = [part.view(shape) for part in parts]
        flat = resolve_geometry(parts, EngineKVFormat.NL_X_NB_BS_HS)
        windows, pieces = [], []
        for index, (chunk, blocks) in enumerate(zip(chunks, block_ids, strict=True)):
            tokens = len(blocks) * flat.block_size
            ids = [_whole_number(block, "a block id") for block in blocks]
            for block in ids:
                if not 0 <= block < flat.num_blocks:
                    raise ValueError(
                        f"block id {block} is outside of the KV cache, which has "
                        f"blocks 0 to {flat.num_blocks - 1}"
                    )
            wanted = len(parts) * tokens * flat.head_size
            if chunk.device != flat.device or chunk.numel() != wanted:
                raise ValueError(
                    f"chunk {index} has {chunk.numel()} elements on {chunk.device}, "
                    f"wanted {wanted} on {flat.device}"
                )
            windows.append(chunk.view(len(parts), tokens, flat.head_size))
            most = kv_transfer.max_piece_elements(flat)
            skip = skip_blocks[index]
            for piece in plan_pieces(flat, [tokens], [ids], skip, most):
                pieces.append(piece._replace(chunk=index))
        gathers = direction == TransferDirection.D2H
        if not gathers:
            written = [
                b for c, n in zip(block_ids, skip_blocks, strict=True) for b in c[n:]
            ]
            _require_distinct([written], 0)
        kv_transfer.transfer(flat, parts, windows, pieces, to_host=gathers)


def _tokens(chunk: torch.Tensor) -> int:
    """Return how many tokens a chunk holds (its axis but one)."""
    return chunk.shape[-2]


def _require_tensors(operands: object, what: str) -> list[torch.Tensor]:
    """Refuse everything but a sequence of tensors."""
    if not isinstance(operands, Sequence):
        raise ValueError(
            f"wanted the {what} as a list of tensors, got {type(operands).__name__}"
        )
    others = [
        index
        for index, item in enumerate(operands)
        if not isinstance(item, torch.Tensor)
    ]
    if others:
        raise ValueError(
            f"wanted the {what} as tensors, got {type(operands[others[0]]).__name__} "
            f"at index {others[0]}; RBLN has no use for addresses"
        )
    return list(operands)


def _whole_number(value: object, name: str) -> int:
    """Return a whole number, numpy's included, or refuse the value."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise ValueError(f"{name} wants a whole number, got {value!r}")


def _enum(kind: type[_Enum], value: object, name: str) -> _Enum:
    """Return a member of one of LMCache's enums, also from its number."""
    if isinstance(value, kind):
        return value
    for member in kind.__members__.values():
        if value == member or (isinstance(value, int) and value == int(member)):
            return member
    known = ", ".join(kind.__members__)
    raise ValueError(f"{name} {value!r} is none of {known}")


def _require_device(geometry: KVGeometry, device: torch.device | str) -> None:
    """Refuse layers that are not on the device given."""
    got = geometry.device
    if got.type not in ("rbln", "cpu"):
        raise ValueError(
            f"RBLN block transfer wants KV layers on an rbln device, got {got}"
        )
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as exc:
        raise ValueError(f"{device!r} is no device; pass that of the layers") from exc
    index = wanted.index
    if index is None and wanted.type == "rbln":
        index = torch_rbln().current_device()
    if got.type != wanted.type or (got.type == "rbln" and index != got.index):
        raise ValueError(
            f"the KV layers are on {got} but the transfer is for {wanted}; pass the "
            "device of the layers"
        )


def _require_shape_desc(geometry: KVGeometry, shape_desc: PageBufferShapeDesc) -> None:
    """Refuse a descriptor that disagrees with the layers it describes."""
    if not isinstance(shape_desc, PageBufferShapeDesc):
        raise ValueError(f"shape_desc wants a PageBufferShapeDesc, got {shape_desc!r}")
    # Zero or less: the blocks are as dense as their shape says.
    stride = int(getattr(shape_desc, "block_stride_elems", 0) or 0)
    described = (
        shape_desc.bs,
        shape_desc.nb,
        shape_desc.nl,
        shape_desc.nh,
        shape_desc.hs,
        shape_desc.kv_size,
        shape_desc.element_size,
        stride,
    )
    actual = (
        geometry.block_size,
        geometry.num_blocks,
        geometry.num_layers,
        geometry.num_heads,
        geometry.head_size,
        geometry.num_planes,
        geometry.dtype.itemsize,
        geometry.strides[0] if stride > 0 else stride,
    )
    if described == actual:
        return
    for name, got, wanted in zip(_DESCRIBED, described, actual, strict=True):
        if got != wanted:
            raise ValueError(
                f"shape_desc.{name}={got} but the KV layers have {wanted}; "
                "describe the layers that are passed"
            )


def _require_chunks(
    geometry: KVGeometry, chunks: Sequence[torch.Tensor], chunk_size: int
) -> None:
    """Refuse chunks that do not hold this KV cache's tokens in host memory."""
    block_size = geometry.block_size
    if chunk_size <= 0 or chunk_size % block_size:
        fitting = max(1, -(-chunk_size // block_size)) * block_size
        raise ValueError(
            f"block_size={block_size} but chunk size {chunk_size} is not a positive "
            f"multiple; start the server with --chunk-size {fitting}"
        )
    for index, chunk in enumerate(chunks):
        last = index == len(chunks) - 1
        tokens = _tokens(chunk) if chunk.ndim >= 2 else 0
        fits = 0 < tokens <= chunk_size if last else tokens == chunk_size
        wanted = geometry.chunk_shape(tokens if fits else chunk_size)
        if tuple(chunk.shape) != wanted:
            raise ValueError(
                f"chunk {index} has shape {list(chunk.shape)}, wanted {list(wanted)}"
                f"{' or fewer tokens' if last else ''} for this KV cache"
            )
        if chunk.dtype != geometry.dtype:
            raise ValueError(
                f"chunk {index} is {chunk.dtype} but the KV cache is {geometry.dtype}; "
                "a chunk is stored and restored in the KV cache's dtype"
            )
        if chunk.device.type != "cpu":
            raise ValueError(
                f"chunk {index} is on {chunk.device}, wanted host memory (cpu)"
            )
        if chunk.stride(-1) != 1 and chunk.shape[-1] > 1:
            raise ValueError(
                f"chunk {index} has strides {list(chunk.stride())}; the last axis must "
                "be dense"
            )


def _require_writable(chunks: Sequence[torch.Tensor]) -> None:
    """Refuse chunks that a gather would write to more than once."""
    for index, chunk in enumerate(chunks):
        if chunk.is_contiguous():
            continue
        extent = 1
        for stride, size in sorted(zip(chunk.stride(), chunk.shape, strict=True)):
            if size > 1 and stride < extent:
                raise ValueError(
                    f"chunk {index} has strides {list(chunk.stride())} for shape "
                    f"{list(chunk.shape)}, so its elements overlap; gather into a "
                    "chunk with memory of its own for each"
                )
            extent += stride * (size - 1)
    if len(chunks) == 1:
        return
    # By address; chunks whose extents meet are compared together.
    meeting: list[int] = []
    reach = 0
    for index in sorted(range(len(chunks)), key=lambda i: chunks[i].data_ptr()):
        chunk = chunks[index]
        if chunk.data_ptr() >= reach:
            _require_no_shared_bytes(chunks, meeting)
            meeting = []
        meeting.append(index)
        last = sum(
            stride * (size - 1)
            for stride, size in zip(chunk.stride(), chunk.shape, strict=True)
        )
        reach = max(reach, chunk.data_ptr() + (last + 1) * chunk.element_size())
    _require_no_shared_bytes(chunks, meeting)


def _require_no_shared_bytes(
    chunks: Sequence[torch.Tensor], indices: Sequence[int]
) -> None:
    """Refuse chunks that share bytes; windows of one buffer may interleave."""
    if len(indices) < 2:
        return
    runs = [_dense_runs(chunks[index]) for index in indices]
    starts = np.concatenate([first for first, _ in runs])
    lengths = np.concatenate([np.full(len(first), length) for first, length in runs])
    owners = np.concatenate(
        [np.full(len(run[0]), index) for run, index in zip(runs, indices, strict=True)]
    )
    order = np.argsort(starts, kind="stable")
    ends = (starts + lengths)[order]
    # A chunk's own runs do not overlap, so neighbours tell.
    shared = np.flatnonzero(ends[:-1] > starts[order][1:])
    if len(shared):
        first, second = sorted(owners[order][shared[0] : shared[0] + 2].tolist())
        raise ValueError(
            f"chunks {first} and {second} are the same memory, in whole or in part; "
            "pass a chunk of its own for each to gather into"
        )


def _dense_runs(chunk: torch.Tensor) -> tuple[np.ndarray, int]:
    """Return where a chunk's dense runs start, and the length of each, in bytes."""
    run = 1
    starts = np.zeros(1, dtype=np.int64)
    for stride, size in sorted(zip(chunk.stride(), chunk.shape, strict=True)):
        if size > 1 and stride == run and len(starts) == 1:
            run *= size
        elif size > 1:
            starts = np.add.outer(np.arange(size) * stride, starts).ravel()
    itemsize = chunk.element_size()
    return chunk.data_ptr() + starts * itemsize, run * itemsize


def _split_block_ids(
    geometry: KVGeometry,
    chunks: Sequence[torch.Tensor],
    block_ids: torch.Tensor | Sequence[int],
    chunk_size: int,
) -> list[list[int]]:
    """Return the block ids of each chunk, or refuse a count or an id."""
    ids = block_ids.tolist() if isinstance(block_ids, torch.Tensor) else block_ids
    if not isinstance(ids, Iterable):
        raise ValueError(f"block_ids wants a list of block ids, got {block_ids!r}")
    flat = [_whole_number(block, "a block id") for block in ids]
    for block in flat:
        if not 0 <= block < geometry.num_blocks:
            raise ValueError(
                f"block id {block} is outside of the KV cache, which has blocks 0 to "
                f"{geometry.num_blocks - 1}"
            )
    per_chunk = chunk_size // geometry.block_size
    needed = 0
    if chunks:
        last_blocks = -(-_tokens(chunks[-1]) // geometry.block_size)
        needed = (len(chunks) - 1) * per_chunk + last_blocks
    if len(flat) != needed:
        raise ValueError(
            f"got {len(flat)} block ids, wanted {needed} for {len(chunks)} chunks of "
            f"{per_chunk} blocks; pass the ids that cover the chunks' tokens, and a "
            "shorter last chunk if fewer are stored"
        )
    return [flat[start : start + per_chunk] for start in range(0, needed, per_chunk)]


def _require_distinct(chunk_blocks: Sequence[Sequence[int]], skip_blocks: int) -> None:
    """Refuse two writes to one block."""
    written = [block for blocks in chunk_blocks for block in blocks][skip_blocks:]
    if len(set(written)) != len(written):
        twice = sorted({block for block in written if written.count(block) > 1})
        raise ValueError(
            f"blocks {twice} are destinations of more than one block of tokens; each "
            "block can be restored once per call"
        )
