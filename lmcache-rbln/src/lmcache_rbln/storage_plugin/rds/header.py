# SPDX-License-Identifier: Apache-2.0
"""The header of a chunk on the NVMe: 4096 bytes before the payload.

``docs/rds.md`` specifies every byte. The backend remembers the header of each chunk
that it wrote, and what was read is compared with that: all 4096 bytes.
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
#: Instead of a payload checksum where none is computed.
NO_CHECKSUM = bytes(DIGEST_BYTES)

# magic, version, dtype, number of dimensions, checksum kind, block size, payload bytes,
# key digest, payload checksum, layout name, shape
_FIELDS = struct.Struct(
    f"<8sHHHHQQ{DIGEST_BYTES}s{DIGEST_BYTES}s32s{MAX_DIMS}Q",
)
_SEAL = struct.Struct("<Q")

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
_CHECKSUM_KINDS = {"header": 0, "full": 1}


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
            ValueError: The format has no number for the dtype.
        """
        if self.dtype not in _DTYPE_CODES:
            raise ValueError(f"{self.dtype} has no number in the header format")
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
            self.layout.encode("ascii"),
            *self.shape,
            *[0] * (MAX_DIMS - len(self.shape)),
        )
        body = fields.ljust(HEADER_BYTES - _SEAL.size, b"\0")
        return body + _SEAL.pack(xxhash.xxh3_64_intdigest(body))


def key_digest(key: str) -> bytes:
    """Return the digest of a key.

    Args:
        key: ``CacheEngineKey.to_string()``, which holds model, workers, worker, chunk
            hash, dtype and tags.
    """
    return hashlib.blake2b(key.encode(), digest_size=DIGEST_BYTES).digest()
