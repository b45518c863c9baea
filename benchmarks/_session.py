# SPDX-License-Identifier: Apache-2.0
"""The memory and the calls of one case: floor, stock, generic and ours."""

# Standard
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
import math
import mmap
import time

# Third Party
import torch

# First Party
from benchmarks._cases import BLOCKS_FIRST, FLOOR, GATHER, GENERIC, KV_FIRST, MLA
from benchmarks._cases import OURS, STOCK, Case
from benchmarks._stock import load_ops
from lmcache.lmcache_native import TransferDirection
from lmcache.v1.platform import resolve_device_ops
from lmcache.v1.platform.base.device_ops import DeviceOps
from tests.support import kv_reference

DEVICE = "rbln:0"
_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_LAYOUTS: dict[str, kv_reference.Layout] = {
    BLOCKS_FIRST: "blocks_first",
    KV_FIRST: "kv_first",
    MLA: "mla",
}


class WrongBytesError(RuntimeError):
    """A transfer left other bytes than it should have."""


def load_contenders() -> dict[str, Any]:
    """Return the operations to compare, by contender."""
    return {STOCK: load_ops(), GENERIC: DeviceOps(), OURS: resolve_device_ops("rbln")}


class Session:
    """The paged caches and chunks of one case.

    Bytes are random, the same in all layouts. A paged cache holds one block that no
    call moves.

    Args:
        case: The case.
        operations: See :func:`load_contenders`.
        filled: Whether to set the bytes, as :meth:`verify` needs them.
    """

    def __init__(
        self, case: Case, operations: Mapping[str, Any], filled: bool = True
    ) -> None:
        self.case, self._operations = case, operations
        model, self._dtype = case.geometry, _DTYPES[case.dtype]
        row = model.head_size * self._dtype.itemsize
        sizes = (model.layers, case.pool_blocks, model.heads, case.block_size)
        self._sizes = {
            layout: kv_reference.Case(
                _LAYOUTS[layout], *sizes, model.head_size, self._dtype
            )
            for layout in model.layouts
        }
        blocks = (case.pool_blocks, model.planes, model.heads)
        self._pool_shape = (*blocks, case.block_size, row)
        tokens = (model.planes, model.layers, case.chunk_tokens)
        self._chunk_shape = (*tokens, model.heads * row)
        ids = sum((case.block_ids(thread) for thread in range(case.threads)), [])
        step = case.blocks_per_chunk
        self._ids = [ids[first : first + step] for first in range(0, len(ids), step)]
        # Pageable shared memory, as LMCache's pool is.
        size = math.prod(self._chunk_shape)
        self.chunks = [
            torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8) for _ in self._ids
        ]
        self._wanted: list[torch.Tensor] = []
        self._pools: dict[str, list[torch.Tensor]] = {x: [] for x in model.layouts}
        self._untouched: list[torch.Tensor] = []
        self._fill(filled)
        # LMCache makes them before it calls, so that is not timed.
        self._arguments = {
            (layout, thread): self._make_arguments(layout, thread)
            for layout in self._pools
            for thread in range(case.threads)
        }
        self._flat = [
            (
                torch.empty(case.bytes, dtype=torch.uint8, pin_memory=True),
                on_device((case.bytes,), torch.uint8),
            )
            for _ in range(case.threads)
        ]
        # One stream for all, as LMCache's asynchronous store has it.
        self._stream = _rbln().Stream()
        self._workers = ThreadPoolExecutor(case.threads)
        self._salt = 0

    def _fill(self, filled: bool) -> None:
        words = torch.empty(math.prod(self._pool_shape) // 8, dtype=torch.int64)
        bits = words.view(torch.uint8).view(self._pool_shape)
        if filled:
            for chunk in self.chunks:
                chunk.fill_(0)  # its pages are in place
            self._wanted = [
                torch.empty(self._chunk_shape, dtype=torch.uint8) for _ in self.chunks
            ]
        random = torch.Generator().manual_seed(0)
        for layer in range(self.case.geometry.layers):
            if filled:
                words.random_(generator=random)
                self._untouched.append(bits[-1].clone())
            for layout, pool in self._pools.items():
                pool.append(on_device(self._sizes[layout].layer_shape, self._dtype))
                if filled:
                    values = _arranged(bits, layout).contiguous()
                    pool[-1].copy_(values.view(self._dtype))
            for ids, wanted in zip(self._ids, self._wanted, strict=False):
                wanted[:, layer] = _tokens(bits, ids)

    def _make_arguments(self, layout: str, thread: int) -> tuple[Any, ...]:
        """Return a transfer's arguments before and after the direction."""
        case, sizes = self.case, self._sizes[layout]
        layers = self._pools[layout]
        if layout == BLOCKS_FIRST:  # as the detector hands them over
            layers = [layer.squeeze(3) for layer in layers]
        own = self.chunks[thread * case.chunks : (thread + 1) * case.chunks]
        shape = sizes.chunk_shape(case.chunk_tokens)
        chunks = [memory.view(self._dtype).view(shape) for memory in own]
        return (
            (layers, chunks, case.block_ids(thread), torch.device(DEVICE)),
            (sizes.shape_desc(), case.chunk_tokens, sizes.engine_kv_format, 0),
        )

    def contenders(self) -> Iterator[tuple[str, str]]:
        """Yield contenders with the layout they work on.

        The floor has none. Stock refuses blocks-first. For the permuted device tensors
        of the HND layouts torch-rbln 0.12 searches a way to copy for minutes, so the
        generic operations have MLA alone.
        """
        layouts = self.case.geometry.layouts
        yield FLOOR, ""
        yield STOCK, layouts[-1]
        for layout in layouts:
            yield OURS, layout
        if layouts == (MLA,) and self.case.threads == 1:
            yield GENERIC, MLA

    def run(self, contender: str, layout: str, direction: str) -> float:
        """Make a contender's calls, all threads at once, and return the seconds."""
        call = partial(self.call, contender, layout, direction)
        begin = time.perf_counter()
        if self.case.threads == 1:
            call(0)
        else:
            list(self._workers.map(call, range(self.case.threads)))
        return time.perf_counter() - begin

    def call(self, contender: str, layout: str, direction: str, thread: int) -> None:
        """Make one thread's call of a contender."""
        with torch.inference_mode(), _rbln().stream(self._stream):
            if contender == FLOOR:
                source, target = self._ends(direction, thread)
                target.copy_(source, non_blocking=True)
            else:
                gathers = direction == GATHER
                way = TransferDirection.D2H if gathers else TransferDirection.H2D
                before, after = self._arguments[layout, thread]
                operations = self._operations[contender]
                operations.multi_layer_block_kv_transfer(*before, way, *after)
            # Stock and generic leave it to the caller to wait.
            done = _rbln().Event()
            done.record(self._stream)
            done.synchronize()

    def _ends(self, direction: str, thread: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the floor's source and target."""
        host, device = self._flat[thread]
        return (device, host) if direction == GATHER else (host, device)

    def verify(self, contender: str, layout: str, direction: str) -> None:
        """Make a contender's calls and compare every byte with plain indexing.

        Gathers are to be verified before the first scatter.

        Raises:
            WrongBytesError: If a byte is wrong.
        """
        self._salt = self._salt % 255 + 1  # no call leaves what the next one must
        if contender == FLOOR:
            ends = [self._ends(direction, t) for t in range(self.case.threads)]
            for source, _ in ends:
                source.copy_(torch.full_like(source, self._salt, device="cpu"))
            self.run(contender, layout, direction)
            right = all(bool((end.cpu() == self._salt).all()) for _, end in ends)
        elif direction == GATHER:
            for chunk, wanted in zip(self.chunks, self._wanted, strict=True):
                torch.bitwise_not(wanted.flatten(), out=chunk)
            self.run(contender, layout, direction)
            right = all(map(torch.equal, self.chunks, map(torch.flatten, self._wanted)))
        else:
            for chunk, wanted in zip(self.chunks, self._wanted, strict=True):
                torch.bitwise_xor(wanted.flatten(), self._salt, out=chunk)
            self.run(contender, layout, direction)
            right = all(
                map(partial(self._scattered, layout), range(len(self._untouched)))
            )
        if not right:
            raise WrongBytesError(
                f"{self.case}: {contender} left wrong bytes in {direction} {layout}"
            )

    def _scattered(self, layout: str, layer: int) -> bool:
        bits = torch.empty(self._pool_shape, dtype=torch.uint8)
        device = self._pools[layout][layer].cpu()
        _arranged(bits, layout).copy_(device.view(torch.uint8))
        return torch.equal(bits[-1], self._untouched[layer]) and all(
            torch.equal(_tokens(bits, ids), chunk.view(self._chunk_shape)[:, layer])
            for ids, chunk in zip(self._ids, self.chunks, strict=True)
        )

    def close(self) -> None:
        """End its threads and give its memory back."""
        self._workers.shutdown()
        for held in (self._arguments, self._pools, self._flat, self.chunks):
            held.clear()


def _tokens(bits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Return blocks of ``[NB, P, NH, BS, bytes]`` as ``[P, tokens, bytes]``."""
    return bits[ids].permute(1, 0, 3, 2, 4).flatten(1, 2).flatten(2)


def _arranged(bits: torch.Tensor, layout: str) -> torch.Tensor:
    """View ``[NB, P, NH, BS, bytes]`` in a layout."""
    if layout == MLA:
        return bits[:, 0, 0]
    return (bits if layout == BLOCKS_FIRST else bits.transpose(0, 1)).unsqueeze(3)


def on_device(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor with device memory, as a serving KV cache has."""
    tensor = torch.empty(shape, dtype=dtype, device=DEVICE)
    _rbln().bind_device_memory(tensor)
    return tensor


def _rbln() -> Any:
    return torch.rbln  # type: ignore[attr-defined]
