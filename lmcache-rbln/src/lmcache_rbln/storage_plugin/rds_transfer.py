# SPDX-License-Identifier: Apache-2.0
"""Chunks between staging memory and the NVMe, each with a header that proves it."""

# Standard
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

# Third Party
import torch

# First Party
from lmcache.logging import init_logger

# Local
from ..device_streams import InFlightError, streams_of
from .rds_checksum import DeviceChecksum
from .rds_device import RDSDevice, RDSError, Region, aligned
from .rds_header import HEADER_BYTES, NO_CHECKSUM, ChunkHeader, mismatch
from .rds_staging import StagedMemoryObj

logger = init_logger(__name__)

#: Bytes that are read before the first chunk of them is verified.
GROUP_BYTES = 8 << 20


@dataclass
class Write:
    """A chunk to be written.

    Attributes:
        obj: The chunk.
        region: Where to.
        key: Digest of its key.
    """

    obj: StagedMemoryObj
    region: Region
    key: bytes


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


class ChunkTransfer:
    """Writes and reads batches of chunks; any number of threads may call.

    Args:
        device: The storage.
        checksum_kind: ``full`` or ``header``.
    """

    def __init__(self, device: RDSDevice, checksum_kind: str) -> None:
        self._device = device
        self._kind = checksum_kind
        self._streams = streams_of(device.device)
        self._checksum = DeviceChecksum(device.device)

    def write(self, batch: Sequence[Write]) -> list[ChunkHeader]:
        """Write chunks: payloads first, headers when those are down.

        Args:
            batch: The chunks; the objects must stay unchanged until the call returns.

        Returns:
            Their headers.

        Raises:
            RDSError: The storage or the device failed; no chunk of the batch counts as
                written.
        """
        try:
            with self._device.batch() as transfers:
                for item in batch:
                    transfers.write(item.region, HEADER_BYTES, item.obj.slot.payload)
                # While the NVMe is busy with the payloads.
                headers = [self._header_of(item) for item in batch]
            objs = [item.obj for item in batch]
            with _reuse_only_if_idle(objs), self._streams.transfer():
                for obj, header in zip(objs, headers, strict=True):
                    data = bytearray(header.encode())
                    obj.slot.header.copy_(torch.frombuffer(data, dtype=torch.uint8))
            with self._device.batch() as transfers:
                for item in batch:
                    transfers.write(item.region, 0, item.obj.slot.header)
        except RDSError:
            raise
        except RuntimeError as error:
            raise RDSError(f"the device failed: {error}") from error
        return headers

    def read(self, batch: Sequence[Read]) -> None:
        """Read and verify chunks; ``error`` of each tells whether it can be used.

        Args:
            batch: The chunks. They are read in groups, and one group is verified while
                the next one is read.
        """
        unverified: list[Read] = []
        for group in _groups(batch):
            unverified = self._read_group(group, unverified)
        self._verify(unverified)

    def _read_group(self, group: list[Read], unverified: list[Read]) -> list[Read]:
        """Read a group and verify another meanwhile; returns what is to be verified."""
        try:
            with self._device.batch() as transfers:
                for item in group:
                    slot = item.obj.slot
                    transfers.read(item.region, 0, slot.header)
                    transfers.read(item.region, HEADER_BYTES, slot.payload)
                self._verify(unverified)
            return group
        except Exception as error:
            for item in group:
                item.error = str(error)
        self._verify(unverified)
        if len(group) == 1:
            return []
        # It is not told which one failed: the others are sound.
        return [item for one in group for item in self._read_group([one], [])]

    def _header_of(self, item: Write) -> ChunkHeader:
        obj = item.obj
        full = self._kind == "full"
        return ChunkHeader(
            key=item.key,
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
        with _reuse_only_if_idle([obj]), self._streams.transfer():
            header = obj.slot.header.cpu()
        why = mismatch(header.numpy().tobytes(), wanted)
        if why is not None or wanted.checksum_kind != "full":
            return why
        if self._digest(obj, wanted.payload_bytes) != wanted.checksum:
            return "the checksum of its payload is wrong"
        return None

    def _digest(self, obj: StagedMemoryObj, nbytes: int) -> bytes:
        with _reuse_only_if_idle([obj]):
            return self._checksum.digest(obj.slot.payload, nbytes)


@contextmanager
def _reuse_only_if_idle(objs: Iterable[StagedMemoryObj]) -> Iterator[None]:
    try:
        yield
    except InFlightError:
        for obj in objs:
            obj.retire()
        raise


def region_bytes(slot_bytes: int) -> int:
    """Size of the region for a chunk.

    Args:
        slot_bytes: Size of a staging slot's payload.
    """
    return HEADER_BYTES + aligned(slot_bytes)


def _groups(batch: Sequence[Read]) -> Iterator[list[Read]]:
    group: list[Read] = []
    nbytes = 0
    for item in batch:
        group.append(item)
        nbytes += item.obj.slot.payload.numel()
        if nbytes >= GROUP_BYTES:
            yield group
            group, nbytes = [], 0
    if group:
        yield group
