# SPDX-License-Identifier: Apache-2.0
"""vLLM's paged KV cache as transfers see it, and where a chunk lies in it."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

# Third Party
import torch

# First Party
from lmcache.lmcache_native import EngineKVFormat
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.utils import (
    get_block_size,
    get_device,
    get_num_blocks,
    get_num_layers,
    make_page_buffer_shape_desc,
    normalize_kv_and_discover_format,
)
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import resolve_device_ops
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.ops_types import PageBufferShapeDesc


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


def tensor_of(chunk: ChunkBlocks) -> torch.Tensor:
    """Return the tensor of a chunk's memory object, or refuse one that was freed."""
    tensor = chunk.memory_obj.tensor
    if tensor is None:
        raise ValueError("a memory object has no tensor; it was freed too early")
    return tensor
