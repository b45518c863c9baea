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
import contextlib
import functools
import operator

# Third Party
import torch

# First Party
from lmcache.lmcache_native import EngineKVFormat, TransferDirection
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.devices.rbln import block_transfer, staging
from lmcache.v1.platform.devices.rbln.kv_layout import (
    KVGeometry,
    LayerTraits,
    layer_traits,
    resolve_geometry,
)
from lmcache.v1.platform.devices.rbln.lanes import torch_rbln
from lmcache.v1.platform.devices.rbln.native import kv_transpose
from lmcache.v1.platform.ops_types import PageBufferShapeDesc


#: A native enum; what it offers is not known to type checkers.
_Enum = TypeVar("_Enum", bound=Any)

#: What a shape descriptor says of the layers, in the order of their sizes.
_DESCRIBED = (
    "nb",
    "kv_size",
    "nh",
    "bs",
    "hs",
    "nl",
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
        if skip_blocks < 0:
            raise ValueError(
                f"skip_prefix_n_blocks={skip_blocks} is negative; pass 0 to skip "
                "nothing"
            )
        to_chunks = _is_gather(direction)
        if not isinstance(shape_desc, PageBufferShapeDesc):
            raise ValueError(
                f"shape_desc wants a PageBufferShapeDesc, got {shape_desc!r}"
            )
        geometry = _checked_geometry(
            layer_traits(layers),
            _enum(EngineKVFormat, engine_kv_format, "engine_kv_format"),
            _with_index(device),
            len(layers),
            tuple(getattr(shape_desc, name, 0) for name in _DESCRIBED),
            chunk_size,
        )
        block_transfer.transfer(
            kv_transpose().plan_host(
                to_chunks,
                layers,
                geometry.sizes,
                geometry.strides,
                chunks,
                _whole_numbers(block_ids),
                chunk_size,
                skip_blocks,
                staging.BUFFER_BYTES,
            )
        )

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
        geometry = resolve_geometry(layer_traits(layers), engine_kv_format)
        block_transfer.transfer(
            kv_transpose().plan_device(
                _is_gather(direction),
                layers,
                geometry.sizes,
                geometry.strides,
                chunks,
                list(zip(block_ids, skip_blocks, strict=True)),
            )
        )


def _require_tensors(operands: object, what: str) -> list[torch.Tensor]:
    """Refuse everything but a sequence of tensors."""
    if not isinstance(operands, Sequence):
        raise ValueError(
            f"wanted the {what} as a list of tensors, got {type(operands).__name__}"
        )
    tensors = list(operands)
    for index, item in enumerate(tensors):
        if not isinstance(item, torch.Tensor):
            raise ValueError(
                f"wanted the {what} as tensors, got {type(item).__name__} at index "
                f"{index}; RBLN has no use for addresses"
            )
    return tensors


def _whole_number(value: object, name: str) -> int:
    """Return a whole number of 64 bits, numpy's included, or refuse the value."""
    with contextlib.suppress(TypeError):
        number = operator.index(value)  # type: ignore[arg-type]
        if not isinstance(value, bool) and abs(number) < 1 << 63:
            return number
    raise ValueError(f"{name} wants a whole number, got {value!r}")


def _whole_numbers(block_ids: torch.Tensor | Sequence[int]) -> list[int]:
    """Return block ids as a list, or refuse them."""
    ids = block_ids.tolist() if isinstance(block_ids, torch.Tensor) else block_ids
    if not isinstance(ids, Iterable):
        raise ValueError(f"block_ids wants a list of block ids, got {block_ids!r}")
    return [_whole_number(block, "a block id") for block in ids]


def _enum(kind: type[_Enum], value: object, name: str) -> _Enum:
    """Return a member of one of LMCache's enums, also from its number."""
    if isinstance(value, kind):
        return value
    for member in kind.__members__.values():
        if value == member or (isinstance(value, int) and value == int(member)):
            return member
    known = ", ".join(kind.__members__)
    raise ValueError(f"{name} {value!r} is none of {known}")


def _is_gather(direction: TransferDirection) -> bool:
    return _enum(TransferDirection, direction, "direction") == TransferDirection.D2H


def _with_index(device: torch.device | str) -> torch.device:
    """Return a device with its index, or refuse what is none."""
    try:
        wanted = device if isinstance(device, torch.device) else torch.device(device)
    except (RuntimeError, TypeError) as exc:
        raise ValueError(f"{device!r} is no device; pass that of the layers") from exc
    if wanted.type == "rbln" and wanted.index is None:
        return torch.device("rbln", torch_rbln().current_device())
    return wanted


@functools.lru_cache
def _checked_geometry(
    layer: LayerTraits,
    kv_format: EngineKVFormat,
    wanted: torch.device,
    num_layers: int,
    described: tuple[int, ...],
    chunk_size: int,
) -> KVGeometry:
    """Return the geometry of layers, or refuse what a call says of them.

    Each transfer asks, mostly for the same cache, and has to wait for the answer.
    """
    geometry = resolve_geometry(layer, kv_format)
    got = geometry.device
    if got.type not in ("rbln", "cpu"):
        raise ValueError(
            f"RBLN block transfer wants KV layers on an rbln device, got {got}"
        )
    # The host has one device, whatever its index.
    if got.type != wanted.type or (got.type == "rbln" and got != wanted):
        raise ValueError(
            f"the KV layers are on {got} but the transfer is for {wanted}; pass the "
            "device of the layers"
        )
    # Zero or less: the blocks are as dense as their shape says.
    stride = geometry.strides[0] if described[-1] > 0 else described[-1]
    actual = (*geometry.sizes, num_layers, geometry.dtype.itemsize, stride)
    for name, is_, should in zip(_DESCRIBED, described, actual, strict=True):
        if is_ != should:
            raise ValueError(
                f"shape_desc.{name}={is_} but the KV layers have {should}; describe "
                "the layers that are passed"
            )
    block_size = geometry.sizes[3]
    if chunk_size <= 0 or chunk_size % block_size:
        fitting = max(1, -(-chunk_size // block_size)) * block_size
        raise ValueError(
            f"block_size={block_size} but chunk size {chunk_size} is not a positive "
            f"multiple; start the server with --chunk-size {fitting}"
        )
    return geometry
