# SPDX-License-Identifier: Apache-2.0
"""Chunks between staging memory and the NVMe, each with a header that proves it.

The NPU computes no checksum, so the bytes of a payload are copied to the host for it,
in tiles: one is hashed while the next is copied. Both run while the NVMe is busy with
the same chunk (writes) or the next one (reads).

Copies between NPU and host go through LMCache's device operations, to which the bytes
are a KV cache of one block: they have a stream of their own, so that a failure is told
here and to nobody else, and are complete on return.
"""

# Standard
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

# Third Party
import torch
import xxhash

# First Party
from lmcache.lmcache_native import EngineKVFormat, TransferDirection
from lmcache.v1.platform import resolve_device_ops
from lmcache.v1.platform.devices.rbln.block_transfer import StillInFlightError
from lmcache.v1.platform.ops_types import PageBufferShapeDesc
from lmcache_rbln.device_chunks import retire_if_in_flight

# Local
from .device import ALIGNMENT, RDSDevice, RDSError, Region, aligned
from .header import HEADER_BYTES, NO_CHECKSUM, ChunkHeader
from .staging import StagedMemoryObj
from .threads import DaemonThreads

TILE_BYTES = 8 << 20
#: Threads that hash at the same time; more would wait for the link anyway.
MAX_HASHERS = 3

_Tiles = list[torch.Tensor]


@dataclass
class Read:
    """A chunk to be read.

    Attributes:
        obj: Where to.
        region: Where from.
        header: What its header must say.
        error: Why it cannot be used; ``None`` once it is read and verified.
        damaged: Whether it was read and is not what was written.
    """

    obj: StagedMemoryObj
    region: Region
    header: ChunkHeader
    error: str | None = "not read"
    damaged: bool = False


class ChunkIO:
    """Writes and reads chunks; any number of threads may call.

    Args:
        device: The storage.
        checksum_kind: ``full`` or ``header``.
        tile_bytes: Bytes of one host buffer of a checksum, a multiple of 4096.
    """

    def __init__(
        self, device: RDSDevice, checksum_kind: str, tile_bytes: int = TILE_BYTES
    ) -> None:
        self._device = device
        self._kind = checksum_kind
        self._tile_bytes = tile_bytes
        # Current while copies are issued: nobody queues anything on it, so they wait
        # for nothing.
        self._idle_stream = torch.rbln.Stream(device=device.device)
        self._fetchers = DaemonThreads(MAX_HASHERS, "rds-checksum")
        # Tiles of each hasher, made when they are first used.
        self._tiles: SimpleQueue[_Tiles | None] = SimpleQueue()
        for _ in range(MAX_HASHERS):
            self._tiles.put(None)
        # Tiles that a copy may still write to: nobody must get their memory.
        self._lost: list[_Tiles] = []

    def write(
        self, batch: Sequence[tuple[bytes, StagedMemoryObj, Region]]
    ) -> list[ChunkHeader]:
        """Write chunks: payloads first, headers when those are down.

        Args:
            batch: Of each the digest of its key, the chunk, which must stay unchanged
                until the call returns, and where to.

        Returns:
            Their headers.

        Raises:
            RDSError: The storage or the device failed; no chunk of the batch counts as
                written.
        """
        objs = [obj for _, obj, _ in batch]
        try:
            with self._device.batch() as transfers:
                for _, obj, region in batch:
                    transfers.write(region, HEADER_BYTES, obj.payload)
                # While the NVMe is busy with the payloads.
                headers = [self._header_of(key, obj) for key, obj, _ in batch]
            encoded = bytearray(b"".join(header.encode() for header in headers))
            host = torch.frombuffer(encoded, dtype=torch.uint8)
            self._copy(objs, [obj.slot.header for obj in objs], host, to_host=False)
            with self._device.batch() as transfers:
                for _, obj, region in batch:
                    transfers.write(region, 0, obj.slot.header)
        except RDSError:
            raise
        except RuntimeError as error:
            raise RDSError(f"the device failed: {error}") from error
        return headers

    def read(self, batch: Sequence[Read]) -> None:
        """Read and verify chunks, one while the next is read.

        Args:
            batch: The chunks; ``error`` of each tells whether it can be used.
        """
        unverified: list[Read] = []
        for item in batch:
            try:
                with self._device.batch() as transfers:
                    transfers.read(item.region, 0, item.obj.slot.header)
                    transfers.read(item.region, HEADER_BYTES, item.obj.payload)
                    self._verify(unverified)
                unverified.append(item)
            except Exception as error:
                item.error = str(error)
        self._verify(unverified)

    def close(self) -> None:
        """End the threads."""
        self._fetchers.close(cancel=False)

    def _header_of(self, key: bytes, obj: StagedMemoryObj) -> ChunkHeader:
        full = self._kind == "full"
        return ChunkHeader(
            key=key,
            payload_bytes=obj.payload_bytes,
            shape=tuple(obj.meta.shape),
            dtype=obj.get_dtype(),
            layout=obj.layout,
            block_size=obj.block_size,
            checksum_kind=self._kind,
            checksum=self._digest(obj, obj.payload_bytes) if full else NO_CHECKSUM,
        )

    def _verify(self, items: list[Read]) -> None:
        """Verify chunks and empty the list; what one of them raises is its own miss."""
        while items:
            item = items.pop()
            try:
                item.error = self._mismatch(item)
                item.damaged = item.error is not None
            except Exception as error:
                item.error = f"it could not be verified: {error!r}"

    def _mismatch(self, item: Read) -> str | None:
        obj, wanted = item.obj, item.header
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._copy([obj], [obj.slot.header], header, to_host=True)
        if header.numpy().tobytes() != wanted.encode():
            return "its header is not the one that was written"
        if wanted.checksum_kind != "full":
            return None
        if self._digest(obj, wanted.payload_bytes) != wanted.checksum:
            return "the checksum of its payload is wrong"
        return None

    def _digest(self, obj: StagedMemoryObj, nbytes: int) -> bytes:
        """XXH3-128 of the first bytes of a payload."""
        # Given back in the end, whatever happens: with the last of them, hashing ends.
        tiles = self._tiles.get()
        state = xxhash.xxh3_128()
        parts = obj.payload[: aligned(nbytes)].split(self._tile_bytes)
        copies: list[Future[torch.Tensor]] = []

        def fetch(number: int) -> torch.Tensor:
            assert tiles is not None
            part = parts[number]
            tile = tiles[number % 2][: part.numel()]
            self._copy([obj], [part], tile, to_host=True)
            return tile

        try:
            if tiles is None:
                tiles = [
                    torch.empty(self._tile_bytes, dtype=torch.uint8, pin_memory=True)
                    for _ in range(2)
                ]
            copies.append(self._fetchers.submit(fetch, 0))
            for number in range(len(parts)):
                tile = copies[number].result()
                if number + 1 < len(parts):
                    copies.append(self._fetchers.submit(fetch, number + 1))
                left = nbytes - number * self._tile_bytes
                state.update(tile[:left].numpy().data)
            return state.digest()
        finally:
            wait(copies)
            if any(isinstance(copy.exception(), StillInFlightError) for copy in copies):
                assert tiles is not None
                self._lost.append(tiles)
                tiles = None
            self._tiles.put(tiles)

    def _copy(
        self,
        objs: Sequence[StagedMemoryObj],
        tensors: Sequence[torch.Tensor],
        host: torch.Tensor,
        to_host: bool,
    ) -> None:
        """Copy between parts of chunks and host memory, whole pages.

        Args:
            objs: The chunks; retired if the copies are not known to have ended.
            tensors: Parts of them, alike, flat uint8 on the device.
            host: As many bytes, one tensor after the other.
            to_host: The direction.
        """
        pages = tensors[0].numel() // ALIGNMENT
        described: Any = PageBufferShapeDesc()
        described.kv_size = described.nb = described.nh = described.element_size = 1
        described.nl = len(tensors)
        described.bs, described.hs = pages, ALIGNMENT
        try:
            with torch.inference_mode(), torch.rbln.stream(self._idle_stream):
                resolve_device_ops("rbln").multi_layer_block_kv_transfer(
                    [tensor.view(1, pages, ALIGNMENT) for tensor in tensors],
                    [host.view(len(tensors), pages, ALIGNMENT)],
                    [0],
                    self._device.device,
                    TransferDirection.D2H if to_host else TransferDirection.H2D,
                    described,
                    pages,
                    EngineKVFormat.NL_X_NB_BS_HS,
                    0,
                )
        except BaseException as error:
            retire_if_in_flight(error, objs)
            raise
