# SPDX-License-Identifier: Apache-2.0
"""An obvious reference for KV transfers: plain indexing on CPU, token by token.

It shares nothing with the backend: no block views, no pieces, no staging.
"""

# Future
from __future__ import annotations

# Standard
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal
import threading

# Third Party
import torch

# First Party
from lmcache.lmcache_native import EngineKVFormat, TransferDirection
from lmcache.v1.platform.devices.rbln.device_ops import RblnDeviceOps
from lmcache.v1.platform.devices.rbln.lmcache_release import BLOCKS_FIRST
from lmcache.v1.platform.ops_types import PageBufferShapeDesc

Layout = Literal["blocks_first", "kv_first", "mla"]
LAYOUTS: tuple[Layout, ...] = ("blocks_first", "kv_first", "mla")
DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
)
_FORMATS = {
    "blocks_first": BLOCKS_FIRST,
    "kv_first": EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS,
    "mla": EngineKVFormat.NL_X_NB_BS_HS,
}


@dataclass(frozen=True)
class Case:
    """Sizes of one KV cache under test."""

    layout: Layout
    num_layers: int = 2
    num_blocks: int = 5
    num_heads: int = 2
    block_size: int = 4
    head_size: int = 8
    dtype: torch.dtype = torch.bfloat16

    @property
    def planes(self) -> int:
        return 1 if self.layout == "mla" else 2

    @property
    def heads(self) -> int:
        return 1 if self.layout == "mla" else self.num_heads

    @property
    def engine_kv_format(self) -> EngineKVFormat:
        return _FORMATS[self.layout]

    @property
    def layer_shape(self) -> tuple[int, ...]:
        tail = (self.heads, 1, self.block_size, self.head_size)
        if self.layout == "blocks_first":
            return (self.num_blocks, 2, *tail)
        if self.layout == "kv_first":
            return (2, self.num_blocks, *tail)
        return (self.num_blocks, self.block_size, self.head_size)

    def chunk_shape(self, tokens: int) -> tuple[int, ...]:
        if self.layout == "mla":
            return (self.num_layers, tokens, self.head_size)
        return (2, self.num_layers, tokens, self.heads * self.head_size)

    def shape_desc(self) -> PageBufferShapeDesc:
        desc = PageBufferShapeDesc()
        desc.kv_size = self.planes
        desc.nl = self.num_layers
        desc.nb = self.num_blocks
        desc.bs = self.block_size
        desc.nh = self.heads
        desc.hs = self.head_size
        desc.element_size = self.dtype.itemsize
        return desc


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a CPU tensor of random bit patterns, NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    count = dtype.itemsize
    for size in shape:
        count *= size
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def unique_values(shape: tuple[int, ...], start: int) -> torch.Tensor:
    """Return a CPU float32 tensor whose elements are consecutive integers."""
    count = 1
    for size in shape:
        count *= size
    return torch.arange(start, start + count, dtype=torch.float32).view(shape)


def upload(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Copy a CPU tensor to ``device``, bound there as a serving KV cache is."""
    if device == "cpu":
        return tensor.clone()
    remote = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    torch.rbln.bind_device_memory(remote)
    remote.copy_(tensor)
    return remote


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes, in host memory and in logical order."""
    return tensor.cpu().contiguous().view(torch.uint8)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View float8 as bytes: CPU indexing of it is not complete in torch."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def token_row(
    case: Case, layer: torch.Tensor, plane: int, block: int, slot: int
) -> list[torch.Tensor]:
    """Return one token's head rows ``[HS]`` in a paged layer, as views."""
    layer = _bits(layer)
    if case.layout == "mla":
        return [layer[block, slot]]
    if case.layout == "blocks_first":
        return [layer[block, plane, head, 0, slot] for head in range(case.heads)]
    return [layer[plane, block, head, 0, slot] for head in range(case.heads)]


def chunk_row(
    case: Case, chunk: torch.Tensor, plane: int, layer: int, token: int
) -> torch.Tensor:
    """Return one token's row ``[NH*HS]`` in a chunk, as a view."""
    chunk = _bits(chunk)
    return chunk[layer, token] if case.layout == "mla" else chunk[plane, layer, token]


def move(
    case: Case,
    to_chunks: bool,
    layers: list[torch.Tensor],
    chunks: list[torch.Tensor],
    block_ids: list[int],
    chunk_tokens: int,
    skip_blocks: int = 0,
) -> None:
    """Gather into, or scatter out of, chunks, in place and one token at a time."""
    for chunk_index, chunk in enumerate(chunks):
        for token in range(chunk.shape[-2]):
            position = chunk_index * chunk_tokens + token
            if position < skip_blocks * case.block_size:
                continue
            block = block_ids[position // case.block_size]
            slot = position % case.block_size
            for index, layer in enumerate(layers):
                for plane in range(case.planes):
                    rows = token_row(case, layer, plane, block, slot)
                    flat = chunk_row(case, chunk, plane, index, token)
                    for head, row in enumerate(rows):
                        start = head * case.head_size
                        part = flat[start : start + case.head_size]
                        if to_chunks:
                            part.copy_(row)
                        else:
                            row.copy_(part)


def transfer(
    case: Case,
    to_chunks: bool,
    layers: list[torch.Tensor],
    chunks: list[torch.Tensor],
    block_ids: list[int],
    chunk_tokens: int,
    skip_blocks: int = 0,
) -> None:
    """The backend's counterpart of :func:`move`."""
    RblnDeviceOps().multi_layer_block_kv_transfer(
        layers,
        chunks,
        block_ids,
        layers[0].device,
        TransferDirection.D2H if to_chunks else TransferDirection.H2D,
        case.shape_desc(),
        chunk_tokens,
        case.engine_kv_format,
        skip_blocks,
    )
    if (
        layers[0].device.type == "rbln"
        and hasattr(torch.rbln, "current_stream")
        # torch-rbln has few streams: that of a thread may be another transfer's too.
        and threading.current_thread() is threading.main_thread()
    ):
        # Complete on return: LMCache frees and reuses chunks at once.
        assert torch.rbln.current_stream(layers[0].device).query()


def assert_same_bytes(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Fail unless both lists hold the same bytes."""
    assert len(got) == len(wanted)
    for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert torch.equal(as_bytes(one), as_bytes(other)), f"tensor {index} differs"


def check_both_directions(
    case: Case,
    device: str,
    block_ids: list[int],
    blocks_per_chunk: int,
    partial_tokens: int = 0,
    skip_blocks: int = 0,
    seed: int = 0,
) -> None:
    """Compare gather and scatter with the reference, byte by byte.

    Every block and every chunk is compared whole, so what a transfer must leave
    alone is checked too.
    """
    chunk_tokens = blocks_per_chunk * case.block_size
    tokens = len(block_ids) * case.block_size
    if partial_tokens:
        tokens += partial_tokens - case.block_size
    sizes = [
        min(chunk_tokens, tokens - start) for start in range(0, tokens, chunk_tokens)
    ]
    layers = [
        random_bits(case.layer_shape, case.dtype, seed + index)
        for index in range(case.num_layers)
    ]
    chunks = [
        random_bits(case.chunk_shape(size), case.dtype, seed + 1000 + index)
        for index, size in enumerate(sizes)
    ]
    for to_chunks in (True, False):
        wanted_layers = [layer.clone() for layer in layers]
        wanted_chunks = [chunk.clone() for chunk in chunks]
        got_layers = [upload(layer, device) for layer in layers]
        got_chunks = [chunk.clone() for chunk in chunks]
        arguments = (block_ids, chunk_tokens, skip_blocks)
        move(case, to_chunks, wanted_layers, wanted_chunks, *arguments)
        transfer(case, to_chunks, got_layers, got_chunks, *arguments)
        assert_same_bytes(got_chunks, wanted_chunks)
        assert_same_bytes(got_layers, wanted_layers)


def check_inference_mode(case: Case, device: str, pinned: bool = False) -> None:
    """Move tensors of inference mode, first inside of it and then from a plain thread.

    vLLM allocates its KV cache there, and LMCache's threads are not in it.
    """
    block_ids, chunk_tokens = [2, 0, 3, 1], 4 * case.block_size

    def check(seed: int) -> None:
        with torch.inference_mode():
            layers = [
                upload(random_bits(case.layer_shape, case.dtype, seed + i), device)
                for i in range(case.num_layers)
            ]
            chunk = random_bits(case.chunk_shape(chunk_tokens), case.dtype, seed + 9)
            chunk = chunk.pin_memory() if pinned else chunk
        assert layers[0].is_inference()
        assert chunk.is_inference()
        for to_chunks in (False, True):
            wanted = [layer.cpu().clone() for layer in layers]
            wanted_chunk = chunk.clone()
            if to_chunks:
                with torch.inference_mode():
                    chunk.zero_()
            move(case, to_chunks, wanted, [wanted_chunk], block_ids, chunk_tokens)
            transfer(case, to_chunks, layers, [chunk], block_ids, chunk_tokens)
            assert_same_bytes([*layers, chunk], [*wanted, wanted_chunk])

    with torch.inference_mode():
        check(1)
    with ThreadPoolExecutor(1) as executor:
        executor.submit(check, 100).result()
