# SPDX-License-Identifier: Apache-2.0
"""The on-disk header, byte by byte, and that nothing damaged passes for one."""

# Standard
from dataclasses import replace
import hashlib
import random
import struct

# Third Party
from hypothesis import given
from hypothesis import strategies as st
import pytest
import torch
import xxhash

# First Party
from lmcache_rbln.storage_plugin.rds_header import (
    HEADER_BYTES,
    ChunkHeader,
    HeaderError,
    decode,
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


@given(
    key=st.binary(min_size=16, max_size=16),
    payload_bytes=st.integers(0, 2**64 - 1),
    shape=st.lists(st.integers(0, 2**64 - 1), max_size=8).map(tuple),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.uint8]),
    layout=st.text("abc-/1", min_size=1, max_size=32),
    block_size=st.integers(0, 2**64 - 1),
    checksum_kind=st.sampled_from(["full", "header"]),
    checksum=st.binary(min_size=16, max_size=16),
)
def test_what_is_written_is_read(**fields: object) -> None:
    header = ChunkHeader(**fields)  # type: ignore[arg-type]
    assert decode(header.encode()) == header


def test_no_flipped_bit_passes() -> None:
    data = HEADER.encode()
    chance = random.Random(0)
    bits = [*range(8 * 170), *range(8 * 4080, 8 * 4096)]
    for bit in bits + chance.sample(range(8 * 4096), 500):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(HeaderError):
            decode(bytes(broken))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "4096 bytes, got 0"),
        (HEADER.encode()[:-1], "4096 bytes, got 4095"),
        (bytes(4096), "no chunk begins here"),
        (b"\xa5" * 4096, "no chunk begins here"),
        (HEADER.encode()[:2048] + bytes(2048), "checksum is wrong"),
    ],
)
def test_what_is_no_header(data: bytes, why: str) -> None:
    with pytest.raises(HeaderError, match=why):
        decode(data)


def test_another_version_is_refused() -> None:
    body = bytearray(HEADER.encode()[:4088])
    body[8] = 2
    sealed = bytes(body) + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
    with pytest.raises(HeaderError, match="header version 2, this is version 1"):
        decode(sealed)


@pytest.mark.parametrize("at", [10, 12, 14])
def test_a_number_out_of_range_is_refused(at: int) -> None:
    body = bytearray(HEADER.encode()[:4088])
    body[at] = 99
    sealed = bytes(body) + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
    with pytest.raises(HeaderError, match="out of range"):
        decode(sealed)


def test_what_does_not_fit_is_refused() -> None:
    for wrong in (
        replace(HEADER, dtype=torch.complex64),
        replace(HEADER, shape=(1,) * 9),
        replace(HEADER, layout="x" * 33),
        replace(HEADER, key=b"short"),
    ):
        with pytest.raises(HeaderError):
            wrong.encode()


def test_the_key_digest() -> None:
    assert key_digest("m@1@0@ff@bfloat16") == (
        hashlib.blake2b(b"m@1@0@ff@bfloat16", digest_size=16).digest()
    )
    assert key_digest("a") != key_digest("b")
