# SPDX-License-Identifier: Apache-2.0
"""The header of a chunk on the NVMe: 4096 bytes before the payload.

``docs/rds.md`` specifies every byte. A header says what the payload is; whatever does
not match it is no chunk.
"""

# Standard
from dataclasses import dataclass
import hashlib
import struct

# Third Party
import torch
import xxhash

HEADER_BYTES = 4096
MAGIC = b"RBLNKVC\n"
VERSION = 1
MAX_DIMS = 8
DIGEST_BYTES = 16
LAYOUT_BYTES = 32
#: Instead of a payload checksum where none is computed.
NO_CHECKSUM = bytes(DIGEST_BYTES)

# magic, version, dtype, number of dimensions, checksum kind, block size, payload bytes,
# key digest, payload checksum, layout name, shape
_FIELDS = struct.Struct(
    f"<8sHHHHQQ{DIGEST_BYTES}s{DIGEST_BYTES}s{LAYOUT_BYTES}s{MAX_DIMS}Q"
)
_SEAL = struct.Struct("<Q")
_SEAL_AT = HEADER_BYTES - _SEAL.size

# On-disk numbers: never reuse one.
_DTYPE_CODES = {
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float32: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
    torch.uint8: 6,
    torch.int8: 7,
}
_DTYPES = {code: dtype for dtype, code in _DTYPE_CODES.items()}
_CHECKSUM_KINDS = {"header": 0, "full": 1}
_CHECKSUM_NAMES = {code: name for name, code in _CHECKSUM_KINDS.items()}


class HeaderError(ValueError):
    """Bytes that are not the header of a chunk; the message says why."""


@dataclass(frozen=True)
class ChunkHeader:
    """What a chunk is.

    Attributes:
        key: Digest of LMCache's key, see :func:`key_digest`.
        payload_bytes: Length of the payload.
        shape: LMCache's shape of the chunk, at most eight dimensions.
        dtype: Of its elements.
        layout: Name and version of the order of the elements, at most 32 ASCII
            characters.
        block_size: Tokens per block of that layout; 0 if it has no blocks.
        checksum_kind: ``full`` or ``header``.
        checksum: XXH3-128 of the payload, or 16 zeros.
    """

    key: bytes
    payload_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    block_size: int
    checksum_kind: str
    checksum: bytes

    def encode(self) -> bytes:
        """Return the 4096 bytes of the header.

        Raises:
            HeaderError: A field does not fit.
        """
        if self.dtype not in _DTYPE_CODES:
            raise HeaderError(f"{self.dtype} has no number in the header format")
        if self.checksum_kind not in _CHECKSUM_KINDS:
            raise HeaderError(f"{self.checksum_kind!r} is no kind of checksum")
        name = self.layout
        if not (name.isascii() and 0 < len(name) <= LAYOUT_BYTES) or "\0" in name:
            raise HeaderError(
                f"the layout name {name!r} is not 1 to {LAYOUT_BYTES} ASCII characters"
            )
        numbers = (self.block_size, self.payload_bytes, *self.shape)
        if len(self.shape) > MAX_DIMS or not all(0 <= n < 1 << 64 for n in numbers):
            raise HeaderError(
                f"a shape of {self.shape}, {self.payload_bytes} bytes or blocks of "
                f"{self.block_size} tokens do not fit: at most {MAX_DIMS} dimensions, "
                "and numbers of 64 bits without a sign"
            )
        if len(self.key) != DIGEST_BYTES or len(self.checksum) != DIGEST_BYTES:
            raise HeaderError(f"digests must have {DIGEST_BYTES} bytes")
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            _DTYPE_CODES[self.dtype],
            len(self.shape),
            _CHECKSUM_KINDS[self.checksum_kind],
            self.block_size,
            self.payload_bytes,
            self.key,
            self.checksum,
            name.encode("ascii"),
            *self.shape,
            *[0] * (MAX_DIMS - len(self.shape)),
        )
        body = fields.ljust(_SEAL_AT, b"\0")
        return body + _SEAL.pack(xxhash.xxh3_64_intdigest(body))


def decode(data: bytes) -> ChunkHeader:
    """Read a header.

    Args:
        data: 4096 bytes.

    Raises:
        HeaderError: They are not, to the last byte, what :meth:`ChunkHeader.encode`
            makes in this version.
    """
    if len(data) != HEADER_BYTES:
        raise HeaderError(f"a header has {HEADER_BYTES} bytes, got {len(data)}")
    if data[: len(MAGIC)] != MAGIC:
        raise HeaderError("no chunk begins here")
    body = data[:_SEAL_AT]
    if _SEAL.unpack_from(data, _SEAL_AT)[0] != xxhash.xxh3_64_intdigest(body):
        raise HeaderError("the header's own checksum is wrong")
    (
        _,
        version,
        dtype,
        dims,
        kind,
        block_size,
        payload_bytes,
        key,
        checksum,
        layout,
        *shape,
    ) = _FIELDS.unpack_from(data)
    if version != VERSION:
        raise HeaderError(f"header version {version}, this is version {VERSION}")
    if dtype not in _DTYPES or dims > MAX_DIMS or kind not in _CHECKSUM_NAMES:
        raise HeaderError("a field of the header is out of range")
    name = layout.rstrip(b"\0")
    if not name.isascii():
        raise HeaderError(f"the layout name {name!r} is not ASCII")
    header = ChunkHeader(
        key=key,
        payload_bytes=payload_bytes,
        shape=tuple(shape[:dims]),
        dtype=_DTYPES[dtype],
        layout=name.decode("ascii"),
        block_size=block_size,
        checksum_kind=_CHECKSUM_NAMES[kind],
        checksum=checksum,
    )
    if header.encode() != data:
        raise HeaderError("bytes of the header that must be zero are not")
    return header


def mismatch(data: bytes, wanted: ChunkHeader) -> str | None:
    """Compare what was read with the header that was written, all 4096 bytes.

    Args:
        data: What was read, any bytes.
        wanted: The header.

    Returns:
        How they differ; ``None`` if they do not.
    """
    if data == wanted.encode():
        return None
    try:
        return f"its header says {decode(data)}, wanted {wanted}"
    except HeaderError as error:
        return str(error)


def key_digest(key: str) -> bytes:
    """Return the digest of a key.

    Args:
        key: ``CacheEngineKey.to_string()``, which holds model, workers, worker, chunk
            hash, dtype and tags.
    """
    return hashlib.blake2b(key.encode(), digest_size=DIGEST_BYTES).digest()
