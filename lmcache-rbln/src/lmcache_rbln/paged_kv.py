# SPDX-License-Identifier: Apache-2.0
"""Moves KV between vLLM's paged cache and LMCache's memory objects, in process.

All bytes are moved by the active device's public
``DeviceOps.multi_layer_block_kv_transfer``, one call per request.

Host memory objects hold a chunk in LMCache's token-major layout, ``[2, L, T, NH*HS]``
or ``[1, L, T, HS]`` for MLA. A storage backend may hand out memory objects *on the
device* instead (:class:`DeviceChunk`). Nothing but the same device reads those, so they
keep its own order: layer by layer, the chunk's blocks as they lie in the paged cache.

==========================  =============================  ========================
paged cache                 chunk of n blocks              name
==========================  =============================  ========================
``[NB, 2, NH, 1, BS, HS]``  ``[L, n, 2, NH, 1, BS, HS]``   rbln-blocks-first-hnd/1
``[2, NB, NH, 1, BS, HS]``  ``[L, 2, n, NH, 1, BS, HS]``   rbln-kv-first-hnd/1
``[NB, BS, HS]`` (MLA)      ``[L, n, BS, HS]``             rbln-mla/1
==========================  =============================  ========================

To the device operations that is a cache without heads, ``[NB, BS, bytes of a block /
BS]``, and chunks of it.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast, runtime_checkable

# Third Party
import torch

# First Party
from lmcache.lmcache_native import EngineKVFormat, TransferDirection
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.gpu_connector.utils import (
    get_block_size,
    get_device,
    get_num_blocks,
    get_num_layers,
    make_page_buffer_shape_desc,
    normalize_kv_and_discover_format,
)
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.platform import resolve_device_ops
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.devices.rbln.kv_transfer import InFlightError
from lmcache.v1.platform.ops_types import PageBufferShapeDesc

# Format of the paged cache -> name of a device chunk's layout.
_LAYOUTS = {
    EngineKVFormat.NL_X_NB_TWO_NH_BS_HS: "rbln-blocks-first-hnd/1",
    EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS: "rbln-kv-first-hnd/1",
    EngineKVFormat.NL_X_NB_BS_HS: "rbln-mla/1",
}


class TransferFailedError(RuntimeError):
    """A transfer did not complete; the caller still owns the memory objects.

    Attributes:
        memory_objs: The memory objects of the call, none of them to be trusted.
    """

    def __init__(self, message: str, memory_objs: Sequence[MemoryObj]) -> None:
        super().__init__(message)
        self.memory_objs = list(memory_objs)


@runtime_checkable
class DeviceChunk(Protocol):
    """A memory object on the device.

    Attributes:
        payload: Its memory, flat uint8.
        layout: Name of the order of the bytes in it.
        block_size: Tokens per block of that layout.
        payload_bytes: Bytes of it that are filled.
    """

    layout: str
    block_size: int
    payload_bytes: int

    @property
    def payload(self) -> torch.Tensor: ...

    def retire(self) -> None:
        """Let nobody use the memory again: copies on it may be under way for ever."""


@dataclass(frozen=True)
class PagedKV:
    """vLLM's paged KV cache, as far as a transfer must know it.

    Attributes:
        source: The tensors that vLLM registered, one per layer.
        layers: The same storage in the shape that ``kv_format`` describes.
        kv_format: Layout of the layers.
        desc: LMCache's description of the layers.
        ops: Operations of the device that holds them.
    """

    source: tuple[torch.Tensor, ...]
    layers: list[torch.Tensor]
    kv_format: EngineKVFormat
    desc: PageBufferShapeDesc
    ops: DeviceOps

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> PagedKV:
        """Describe a KV cache.

        Args:
            tensors: One per layer, as vLLM registers them.

        Returns:
            The description.

        Raises:
            ValueError: If LMCache does not know the layout.
        """
        kv_format, layers = normalize_kv_and_discover_format(
            list(tensors), EngineType.VLLM
        )
        return cls(
            source=tuple(tensors),
            # One tensor per layer came in, and so they are returned.
            layers=cast("list[torch.Tensor]", layers),
            kv_format=kv_format,
            desc=make_page_buffer_shape_desc(
                layers,
                kv_format,
                layer_idx=0,
                num_layers_in_group=get_num_layers(layers, kv_format),
                num_blocks=get_num_blocks(layers, kv_format),
                block_size=get_block_size(layers, kv_format),
            ),
            ops=resolve_device_ops(get_device(layers).type),
        )

    @property
    def device(self) -> torch.device:
        """Device that holds the layers."""
        return self.layers[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Type of an element."""
        return self.layers[0].dtype

    @property
    def hidden_size(self) -> int:
        """Elements per token, layer and plane."""
        return self.desc.nh * self.desc.hs

    @cached_property
    def as_blocks(self) -> PagedKV:
        """The same storage as device chunks hold it: without heads and planes."""
        layers = self.layers
        if self.kv_format == EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS:
            layers = [plane for layer in layers for plane in layer]
        shape = (self.desc.nb, self.desc.bs, -1)
        return PagedKV.of([layer.view(shape) for layer in layers])

    def is_over(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Tell whether this describes exactly these tensors."""
        return len(tensors) == len(self.source) and all(
            mine is given for mine, given in zip(self.source, tensors, strict=True)
        )


@dataclass(frozen=True)
class ChunkBlocks:
    """One chunk and where it lies in the paged cache.

    Attributes:
        memory_obj: LMCache's memory for the chunk.
        tokens: Tokens in the chunk; the last block may be filled in part.
        block_ids: Blocks of the chunk in token order.
        skip_blocks: Leading blocks that must be left alone.
    """

    memory_obj: MemoryObj
    tokens: int
    block_ids: list[int]
    skip_blocks: int


class RBLNPagedKVConnector(GPUConnectorInterface):
    """LMCache's connector to vLLM-RBLN's paged KV cache.

    Transfers are complete when a call returns. Any number of threads may call.

    Args:
        metadata: LMCache's description of the model.
    """

    def __init__(self, metadata: LMCacheMetadata) -> None:
        self._metadata = metadata
        self._kv: PagedKV | None = None

    def register(self, tensors: Sequence[torch.Tensor]) -> PagedKV:
        """Take the KV cache that transfers are for, in place of an earlier one.

        Args:
            tensors: One per layer, as vLLM registers them.

        Returns:
            What is known of it.

        Raises:
            ValueError: If the tensors have no memory, LMCache does not know their
                layout, or they are not of the model that LMCache was told of.
        """
        if any(tensor.is_meta for tensor in tensors):
            raise ValueError(
                "the KV caches are meta tensors without memory, wanted tensors on the "
                "NPU; start vLLM with VLLM_RBLN_USE_DEVICE_TENSOR=1"
            )
        kv = PagedKV.of(tensors)
        num_layers, planes, _, heads, head_size = self._metadata.kv_shape
        chunk_size = self._metadata.chunk_size
        if chunk_size % kv.desc.bs:
            raise ValueError(
                f"LMCache's chunk size is {chunk_size} tokens, wanted a multiple of "
                f"the KV cache's block size {kv.desc.bs}; set LMCACHE_CHUNK_SIZE"
            )
        facts = {
            "layers": (len(kv.layers), num_layers),
            "planes (K and V)": (kv.desc.kv_size, planes),
            "elements per token": (kv.hidden_size, heads * head_size),
            "dtype": (kv.dtype, self._metadata.kv_dtype),
        }
        for what, (got, wanted) in facts.items():
            if got != wanted:
                raise ValueError(
                    f"{what}: the KV cache has {got}, but LMCache expects {wanted} "
                    "from the model's configuration; this model is not supported"
                )
        self._kv = kv
        return kv

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        """Register the layers in ``kvcaches`` unless they are registered."""
        tensors = kwargs.get("kvcaches")
        if tensors is not None:
            self._kv_of(tensors)

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return the shape of a chunk of ``num_tokens`` tokens."""
        num_layers, planes, _, heads, head_size = self._metadata.kv_shape
        return torch.Size([planes, num_layers, num_tokens, heads * head_size])

    def from_gpu(
        self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any
    ) -> None:
        """Gather one chunk; see :meth:`batched_from_gpu`."""
        self.batched_from_gpu([memory_obj], [start], [end], **kwargs)

    def to_gpu(
        self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any
    ) -> None:
        """Scatter one chunk; see :meth:`batched_to_gpu`."""
        self.batched_to_gpu([memory_obj], [start], [end], **kwargs)

    def batched_from_gpu(  # type: ignore[override]  # lists of lists: layer-wise mode
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Gather token ranges of a request into memory objects.

        Args:
            memory_objs: One per range, each for exactly its tokens.
            starts: First token of each range, at a block's start.
            ends: Token behind each range.
            kwargs: ``kvcaches``: the layers; ``slot_mapping``: slot of each token of
                the request, from its first one on.

        Raises:
            TransferFailedError: If the arguments do not fit or the device fails.
        """
        self._move(TransferDirection.D2H, memory_objs, starts, ends, 0, kwargs)

    def batched_to_gpu(  # type: ignore[override]  # layer-wise mode's other meaning
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Scatter memory objects into the blocks of a request.

        As :meth:`batched_from_gpu`, and ``vllm_cached_tokens`` are leading tokens of
        the request that vLLM holds already: blocks of only such are not written.
        """
        cached = int(kwargs.get("vllm_cached_tokens") or 0)
        self._move(TransferDirection.H2D, memory_objs, starts, ends, cached, kwargs)

    def _kv_of(self, tensors: Sequence[torch.Tensor]) -> PagedKV:
        kv = self._kv
        if kv is not None and kv.is_over(tensors):
            return kv
        return self.register(tensors)

    def _move(
        self,
        direction: TransferDirection,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        cached_tokens: int,
        kwargs: dict[str, Any],
    ) -> None:
        try:
            kv = self._kv_of(kwargs["kvcaches"])
            slots = kwargs["slot_mapping"].to("cpu", torch.long)
            chunks = [
                _locate(kv, obj, slots, start, end, cached_tokens)
                for obj, start, end in zip(memory_objs, starts, ends, strict=True)
            ]
            places = {_tensor(chunk).device for chunk in chunks}
            if wrong := places - {torch.device("cpu"), kv.device}:
                raise ValueError(
                    f"memory objects on {', '.join(map(str, wrong))}, wanted cpu or "
                    f"the KV cache's {kv.device}"
                )
            written = [b for c in chunks for b in c.block_ids[c.skip_blocks :]]
            if direction == TransferDirection.H2D and (
                len(set(written)) != len(written)
            ):
                raise ValueError("a block is to be written twice")
            for run in _runs(chunks, self._metadata.chunk_size):
                if _tensor(run[0]).device == kv.device:
                    self._move_on_device(kv, direction, run)
                else:
                    tensors = [_plane_view(kv, _tensor(chunk)) for chunk in run]
                    self._move_run(kv, direction, run, tensors)
        except Exception as error:
            verb = "gather" if direction == TransferDirection.D2H else "scatter"
            raise TransferFailedError(
                f"could not {verb} KV of {len(memory_objs)} chunks: {error}",
                memory_objs,
            ) from error

    @torch.inference_mode()
    def _move_run(
        self,
        kv: PagedKV,
        direction: TransferDirection,
        run: list[ChunkBlocks],
        tensors: list[torch.Tensor],
    ) -> None:
        # Always in inference mode, for operations that don't see to it themselves: vLLM
        # makes its KV cache there, and it can be written nowhere else.
        kv.ops.multi_layer_block_kv_transfer(
            kv.layers,
            tensors,
            [block for chunk in run for block in chunk.block_ids],
            kv.device,
            direction,
            kv.desc,
            self._metadata.chunk_size,
            kv.kv_format,
            run[0].skip_blocks,
        )

    def _move_on_device(
        self, kv: PagedKV, direction: TransferDirection, run: list[ChunkBlocks]
    ) -> None:
        """Move whole blocks between the cache and chunks on its device."""
        blocks, made = kv.as_blocks, (_LAYOUTS[kv.kv_format], kv.desc.bs)
        gathers = direction == TransferDirection.D2H
        objs: list[DeviceChunk] = []
        tensors: list[torch.Tensor] = []
        for chunk in run:
            obj: object = chunk.memory_obj
            if not isinstance(obj, DeviceChunk):
                raise ValueError(
                    f"memory objects on {kv.device} without a storage backend that "
                    f"keeps chunks there: {obj!r}"
                )
            if not gathers and (obj.layout, obj.block_size) != made:
                raise ValueError(
                    f"the chunk is laid out as {obj.layout} with blocks of "
                    f"{obj.block_size} tokens, the KV cache as {made[0]} with blocks "
                    f"of {made[1]}"
                )
            shape = (len(blocks.layers), len(chunk.block_ids) * kv.desc.bs)
            elements = shape[0] * shape[1] * blocks.hidden_size
            used = obj.payload.view(kv.dtype)[:elements]
            objs.append(obj)
            tensors.append(used.view(*shape, blocks.hidden_size))
        try:
            self._move_run(blocks, direction, run, tensors)
        except InFlightError:
            for obj in objs:
                obj.retire()
            raise
        if gathers:
            for obj, tensor in zip(objs, tensors, strict=True):
                obj.layout, obj.block_size = made
                obj.payload_bytes = tensor.nbytes


def _tensor(chunk: ChunkBlocks) -> torch.Tensor:
    tensor = chunk.memory_obj.tensor
    if tensor is None:
        raise ValueError("a memory object has no tensor; it was freed too early")
    return tensor


def _plane_view(kv: PagedKV, tensor: torch.Tensor) -> torch.Tensor:
    """Return a chunk as device operations take it: MLA has no axis of planes."""
    if kv.desc.kv_size == 1 and tensor.ndim == 4:
        return tensor.squeeze(0)
    return tensor


def _locate(
    kv: PagedKV,
    memory_obj: MemoryObj,
    slots: torch.Tensor,
    start: int,
    end: int,
    cached_tokens: int,
) -> ChunkBlocks:
    """Return the blocks that hold a token range, or refuse it."""
    size = kv.desc.bs
    if not 0 <= start < end <= len(slots) or start % size:
        raise ValueError(
            f"token range [{start}, {end}) wanted inside of {len(slots)} tokens, from "
            f"a multiple of the block size {size} on"
        )
    mapped = slots[start:end]
    blocks = mapped[::size] // size
    offsets = torch.arange(end - start)
    if not torch.equal(mapped, blocks[offsets // size] * size + offsets % size):
        raise ValueError(
            f"the slots of tokens [{start}, {end}) do not fill blocks of {size} tokens "
            "in order"
        )
    # Whole blocks only: what vLLM holds of a block in part is written once more, with
    # the same values.
    skip = max(0, cached_tokens - start) // size
    ids = blocks.tolist()
    if cached_tokens >= end:
        skip = len(ids)
    return ChunkBlocks(memory_obj, end - start, ids, skip)


def _runs(chunks: Sequence[ChunkBlocks], chunk_size: int) -> list[list[ChunkBlocks]]:
    """Split chunks into what one device operation takes.

    All of them are on one device. Only its last chunk may be short, and only its first
    may have blocks to skip.
    """
    runs: list[list[ChunkBlocks]] = []
    for chunk in chunks:
        if chunk.skip_blocks == len(chunk.block_ids):
            continue
        last = runs[-1][-1] if runs else None
        if (
            last is None
            or chunk.skip_blocks
            or last.tokens < chunk_size
            or _tensor(last).device != _tensor(chunk).device
        ):
            runs.append([])
        runs[-1].append(chunk)
    return runs
