# SPDX-License-Identifier: Apache-2.0
"""The on-disk header, byte by byte; damaged ones are in test_rds_chunk_io.py."""

# Standard
from dataclasses import replace
import hashlib
import struct

# Third Party
import pytest
import torch
import xxhash

# First Party
from lmcache_rbln.storage_plugin.rds.header import (
    HEADER_BYTES,
    ChunkHeader,
    key_digest,
)

HEADER = ChunkHeader(
    key=bytes(range(16)),
    payload_bytes=117_440_512,
    shape=(2, 28, 1024, 1024),
    dtype=torch.bfloat16,
    layout="rbln-blocks-first-hnd/1",
    block_size=1024,
    checksum_kind="full",
    checksum=bytes(range(100, 116)),
)


def test_every_byte_is_where_the_specification_says() -> None:
    data = HEADER.encode()
    assert len(data) == HEADER_BYTES == 4096
    assert data[0:8] == b"RBLNKVC\n"
    assert struct.unpack_from("<4H", data, 8) == (1, 2, 4, 1)
    assert struct.unpack_from("<2Q", data, 16) == (1024, 117_440_512)
    assert data[32:48] == bytes(range(16))
    assert data[48:64] == bytes(range(100, 116))
    assert data[64:96] == b"rbln-blocks-first-hnd/1".ljust(32, b"\0")
    assert struct.unpack_from("<8Q", data, 96) == (2, 28, 1024, 1024, 0, 0, 0, 0)
    assert data[160:4088] == bytes(4088 - 160)
    assert struct.unpack_from("<Q", data, 4088)[0] == xxhash.xxh3_64_intdigest(
        data[:4088]
    )


def test_a_dtype_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch.complex64 has no number"):
        replace(HEADER, dtype=torch.complex64).encode()


def test_the_key_digest() -> None:
    assert key_digest("m@1@0@ff@bfloat16") == (
        hashlib.blake2b(b"m@1@0@ff@bfloat16", digest_size=16).digest()
    )
    assert key_digest("a") != key_digest("b")
