# SPDX-License-Identifier: Apache-2.0
"""Moves KV between vLLM's paged cache and LMCache's memory objects, in process.

Host memory objects hold a chunk in LMCache's token-major layout, ``[2, L, T, NH*HS]``
or ``[1, L, T, HS]`` for MLA. They are filled and read by the active device's public
``DeviceOps.multi_layer_block_kv_transfer``, one call per request.

A storage backend may hand out memory objects *on the device* instead
(``device_chunks.py``). Which way one goes is decided by the device of its tensor.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Sequence
from typing import Any

# Third Party
import torch

# First Party
from lmcache.lmcache_native import TransferDirection
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache_rbln._lmcache import GPUConnectorInterface
from lmcache_rbln.device_chunks import move_on_device
from lmcache_rbln.kv_cache import ChunkBlocks, PagedKV, tensor_of


class TransferFailedError(RuntimeError):
    """A transfer did not complete; the caller still owns the memory objects.

    Attributes:
        memory_objs: The memory objects of the call, none of them to be trusted.
    """

    def __init__(self, message: str, memory_objs: Sequence[MemoryObj]) -> None:
        super().__init__(message)
        self.memory_objs = list(memory_objs)


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
            chunks = [c for c in chunks if c.skip_blocks < len(c.block_ids)]
            places = {tensor_of(chunk).device for chunk in chunks}
            if wrong := places - {torch.device("cpu"), kv.device}:
                raise ValueError(
                    f"memory objects on {', '.join(map(str, wrong))}, wanted cpu or "
                    f"the KV cache's {kv.device}"
                )
            host = [c for c in chunks if tensor_of(c).device.type == "cpu"]
            for run in _runs(host, self._metadata.chunk_size):
                self._move_host(kv, direction, run)
            if on_device := [c for c in chunks if tensor_of(c).device == kv.device]:
                move_on_device(kv, direction, on_device)
        except Exception as error:
            verb = "gather" if direction == TransferDirection.D2H else "scatter"
            raise TransferFailedError(
                f"could not {verb} KV of {len(memory_objs)} chunks: {error}",
                memory_objs,
            ) from error

    @torch.inference_mode()
    def _move_host(
        self, kv: PagedKV, direction: TransferDirection, run: list[ChunkBlocks]
    ) -> None:
        # Always in inference mode, for operations that don't see to it themselves: vLLM
        # makes its KV cache there, and it can be written nowhere else.
        kv.ops.multi_layer_block_kv_transfer(
            kv.layers,
            [_plane_view(kv, tensor_of(chunk)) for chunk in run],
            [block for chunk in run for block in chunk.block_ids],
            kv.device,
            direction,
            kv.desc,
            self._metadata.chunk_size,
            kv.kv_format,
            run[0].skip_blocks,
        )


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

    Only its last chunk may be short, and only its first may have blocks to skip.
    """
    runs: list[list[ChunkBlocks]] = []
    for chunk in chunks:
        if not runs or chunk.skip_blocks or runs[-1][-1].tokens < chunk_size:
            runs.append([])
        runs[-1].append(chunk)
    return runs
