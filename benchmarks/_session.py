# SPDX-License-Identifier: Apache-2.0
"""The memory and the calls of one case: floor, stock, generic and ours."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
import math
import mmap
import time

# Third Party
import torch

# First Party
from benchmarks._cases import BLOCKS_FIRST, GATHER, KV_FIRST, MLA, Case
from benchmarks._samples import FLOOR, GENERIC, OURS, STOCK
from benchmarks._stock import load_ops
from lmcache.lmcache_native import EngineKVFormat, TransferDirection
from lmcache.v1.platform import resolve_device_ops
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.devices.rbln import lmcache_release
from lmcache.v1.platform.ops_types import PageBufferShapeDesc

DEVICE = "rbln:0"
_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_Arguments = tuple[tuple[Any, ...], tuple[Any, ...]]
_FORMATS = {
    BLOCKS_FIRST: lmcache_release.BLOCKS_FIRST,
    KV_FIRST: EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS,
    MLA: EngineKVFormat.NL_X_NB_BS_HS,
}


class WrongBytesError(RuntimeError):
    """A transfer left other bytes than it should have."""


def load_contenders() -> dict[str, Any]:
    """Return the operations to compare, by contender."""
    return {
        STOCK: load_ops(),
        GENERIC: DeviceOps(),
        OURS: resolve_device_ops("rbln"),
    }


def shared_memory(size: int, in_place: bool) -> torch.Tensor:
    """Return pageable shared memory as LMCache's pool is.

    Args:
        size: Bytes.
        in_place: Whether to touch its pages now.
    """
    memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    return memory.fill_(0) if in_place else memory


class Session:
    """The paged caches and chunks of one case.

    Bytes are random, the same in all layouts. A paged cache holds one block that no
    call moves.

    Args:
        case: The case.
        operations: See :func:`load_contenders`.
        filled: Whether to fill and to be able to verify; else the bytes are not set.
    """

    def __init__(
        self, case: Case, operations: Mapping[str, Any], filled: bool = True
    ) -> None:
        self.case = case
        self._operations = operations
        self._dtype = _DTYPES[case.dtype]
        self._row_bytes = case.geometry.head_size * self._dtype.itemsize
        self._pools: dict[str, list[torch.Tensor]] = {
            layout: [] for layout in case.geometry.layouts
        }
        self._guards: list[torch.Tensor] = []
        threads = range(case.threads)
        self._expected = [
            [torch.empty(self._chunk_shape, dtype=torch.uint8) for _ in self._chunks]
            for _ in threads
            if filled
        ]
        self.chunks = [
            [shared_memory(self._chunk_bytes, filled) for _ in self._chunks]
            for _ in threads
        ]
        self._make_pools(filled)
        # LMCache makes them before it calls, so that is not timed.
        self._arguments = {
            layout: [self._make_arguments(layout, thread) for thread in threads]
            for layout in self._pools
        }
        self._flat_host = [
            torch.empty(case.bytes, dtype=torch.uint8, pin_memory=True) for _ in threads
        ]
        self._flat_device = [
            _bound(torch.empty(case.bytes, dtype=torch.uint8, device=DEVICE))
            for _ in threads
        ]
        # One stream for all, as LMCache's asynchronous store has it.
        self._stream = _rbln().Stream()
        self._workers = ThreadPoolExecutor(case.threads)

    @property
    def _chunks(self) -> range:
        return range(self.case.chunks)

    @property
    def _chunk_shape(self) -> tuple[int, ...]:
        """Planes, layers, tokens, bytes of a token."""
        model = self.case.geometry
        width = model.heads * self._row_bytes
        return (model.planes, model.layers, self.case.chunk_tokens, width)

    @property
    def _chunk_bytes(self) -> int:
        return math.prod(self._chunk_shape)

    def _make_pools(self, filled: bool) -> None:
        case, model = self.case, self.case.geometry
        shape = (
            case.pool_blocks,
            model.planes,
            model.heads,
            case.block_size,
            self._row_bytes,
        )
        if not filled:
            bits = torch.empty(shape, dtype=torch.uint8, device="meta")
            for layout, pool in self._pools.items():
                pool += [self._allocate(bits, layout) for _ in range(model.layers)]
            return
        random = torch.Generator().manual_seed(0)
        words = torch.empty(math.prod(shape) // 8, dtype=torch.int64)
        bits = words.view(torch.uint8).view(shape)
        for layer in range(model.layers):
            words.random_(generator=random)
            for layout, pool in self._pools.items():
                pool.append(self._allocate(bits, layout))
                pool[-1].copy_(self._arranged(bits, layout).contiguous())
            self._guards.append(bits[-1].clone())
            for thread, chunks in enumerate(self._expected):
                for chunk, expected in enumerate(chunks):
                    expected[:, layer] = self._tokens(bits, self._ids(thread, chunk))

    def _ids(self, thread: int, chunk: int) -> list[int]:
        first = chunk * self.case.blocks_per_chunk
        ids = self.case.block_ids(thread)
        return ids[first : first + self.case.blocks_per_chunk]

    def _tokens(self, bits: torch.Tensor, ids: list[int]) -> torch.Tensor:
        """Return blocks of ``[NB, P, NH, BS, bytes]`` as ``[P, tokens, bytes]``."""
        return bits[ids].permute(1, 0, 3, 2, 4).flatten(1, 2).flatten(2)

    def _arranged(self, bits: torch.Tensor, layout: str) -> torch.Tensor:
        """View ``[NB, P, NH, BS, bytes]`` in a layout and the cache's dtype."""
        values = bits.view(self._dtype)
        if layout == MLA:
            return values[:, 0, 0]
        values = values if layout == BLOCKS_FIRST else values.transpose(0, 1)
        return values.unsqueeze(3)

    def _allocate(self, bits: torch.Tensor, layout: str) -> torch.Tensor:
        shape = self._arranged(bits, layout).shape
        return _bound(torch.empty(shape, dtype=self._dtype, device=DEVICE))

    def _download(self, layout: str, layer: int) -> torch.Tensor:
        """Return a layer as ``[NB, P, NH, BS, bytes]``."""
        host = self._pools[layout][layer].cpu().view(torch.uint8)
        if layout == MLA:
            return host.unsqueeze(1).unsqueeze(1)
        host = host.squeeze(3)
        return host if layout == BLOCKS_FIRST else host.transpose(0, 1)

    def contenders(self) -> Iterator[tuple[str, str]]:
        """Yield contenders with the layout they work on.

        The floor has none. Stock refuses blocks-first.
        """
        layouts = self.case.geometry.layouts
        yield FLOOR, ""
        yield STOCK, layouts[-1]
        for layout in layouts:
            yield OURS, layout
        for layout in layouts:
            yield GENERIC, layout

    def run(self, contender: str, layout: str, direction: str) -> float:
        """Make a contender's calls, all threads at once, and return the seconds."""
        threads = range(self.case.threads)
        begin = time.perf_counter()
        if len(threads) == 1:
            self.call(contender, layout, direction, 0)
        else:
            # Let each thread's error through.
            list(
                self._workers.map(
                    lambda thread: self.call(contender, layout, direction, thread),
                    threads,
                )
            )
        return time.perf_counter() - begin

    def call(self, contender: str, layout: str, direction: str, thread: int) -> None:
        """Make one thread's call of a contender."""
        gathers = direction == GATHER
        with torch.inference_mode(), _rbln().stream(self._stream):
            if contender == FLOOR:
                host, device = self._flat_host[thread], self._flat_device[thread]
                target, source = (host, device) if gathers else (device, host)
                target.copy_(source, non_blocking=True)
            else:
                self._transfer(contender, layout, gathers, thread)
            # Stock and generic leave it to the caller to wait.
            done = _rbln().Event()
            done.record(self._stream)
            done.synchronize()

    def _transfer(
        self, contender: str, layout: str, gathers: bool, thread: int
    ) -> None:
        direction = TransferDirection.D2H if gathers else TransferDirection.H2D
        operands, rest = self._arguments[layout][thread]
        self._operations[contender].multi_layer_block_kv_transfer(
            *operands, direction, *rest
        )

    def _make_arguments(self, layout: str, thread: int) -> _Arguments:
        """Return what precedes and follows the direction in a transfer's arguments."""
        case, model = self.case, self.case.geometry
        layers = self._pools[layout]
        if layout == BLOCKS_FIRST:
            # As the detector hands them over.
            layers = [layer.squeeze(3) for layer in layers]
        description = PageBufferShapeDesc()
        description.kv_size = model.planes
        description.nl = model.layers
        description.nb = case.pool_blocks
        description.bs = case.block_size
        description.nh = model.heads
        description.hs = model.head_size
        description.element_size = self._dtype.itemsize
        shape = self._chunk_shape[model.mla :]
        chunks = [
            memory.view(shape).view(self._dtype) for memory in self.chunks[thread]
        ]
        return (
            (layers, chunks, case.block_ids(thread), torch.device(DEVICE)),
            (description, case.chunk_tokens, _FORMATS[layout], 0),
        )

    def verify(self, contender: str, layout: str, direction: str, salt: int) -> None:
        """Make a contender's calls and compare every byte with plain indexing.

        Gathers are to be verified before the first scatter.

        Args:
            contender: The contender.
            layout: Its layout.
            direction: ``gather`` or ``scatter``.
            salt: Changes the scattered bytes, 1 to 255; another for each call.

        Raises:
            WrongBytesError: If a byte is wrong.
        """
        if contender == FLOOR:
            self._verify_floor(direction, salt)
        elif direction == GATHER:
            self._verify_gather(contender, layout)
        else:
            self._verify_scatter(contender, layout, salt)

    def _verify_floor(self, direction: str, salt: int) -> None:
        gathers = direction == GATHER
        pairs = list(zip(self._flat_host, self._flat_device, strict=True))
        for host, device in pairs:
            if gathers:
                device.copy_(torch.full_like(host, salt))
                host.fill_(0)
            else:
                host.fill_(salt)
        self.run(FLOOR, "", direction)
        for host, device in pairs:
            got = host if gathers else device.cpu()
            if not bool((got == salt).all()):
                raise WrongBytesError(f"{self.case}: floor {direction} is wrong")

    def _verify_gather(self, contender: str, layout: str) -> None:
        for chunks, wanted in zip(self.chunks, self._expected, strict=True):
            for chunk, expected in zip(chunks, wanted, strict=True):
                torch.bitwise_not(expected.flatten(), out=chunk)
        self.run(contender, layout, GATHER)
        for thread, wanted in enumerate(self._expected):
            for index, expected in enumerate(wanted):
                if not torch.equal(self.chunks[thread][index], expected.flatten()):
                    raise WrongBytesError(
                        f"{self.case}: {contender} gathered wrong bytes from {layout} "
                        f"into chunk {index} of thread {thread}"
                    )

    def _verify_scatter(self, contender: str, layout: str, salt: int) -> None:
        for chunks, wanted in zip(self.chunks, self._expected, strict=True):
            for chunk, expected in zip(chunks, wanted, strict=True):
                torch.bitwise_xor(expected.flatten(), salt, out=chunk)
        self.run(contender, layout, "scatter")
        for layer, guard in enumerate(self._guards):
            bits = self._download(layout, layer)
            right = torch.equal(bits[-1], guard)
            for thread, chunks in enumerate(self.chunks):
                for index, chunk in enumerate(chunks):
                    source = chunk.view(self._chunk_shape)[:, layer]
                    got = self._tokens(bits, self._ids(thread, index))
                    right = right and torch.equal(got, source)
            if not right:
                raise WrongBytesError(
                    f"{self.case}: {contender} scattered wrong bytes into layer "
                    f"{layer} of {layout}"
                )

    def close(self) -> None:
        """End its threads and give its memory back."""
        self._workers.shutdown()
        self._arguments.clear()
        for held in (self._pools, self._flat_host, self._flat_device, self.chunks):
            held.clear()


def _rbln() -> Any:
    return torch.rbln  # type: ignore[attr-defined]


def _bound(tensor: torch.Tensor) -> torch.Tensor:
    """Give a tensor device memory, as a serving KV cache has."""
    _rbln().bind_device_memory(tensor)
    return tensor
