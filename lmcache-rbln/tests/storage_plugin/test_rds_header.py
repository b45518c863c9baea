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
    mismatch,
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


def sealed(body: bytes | bytearray) -> bytes:
    """A header with a seal that fits, whatever it says."""
    return bytes(body[:4088]) + struct.pack("<Q", xxhash.xxh3_64_intdigest(body[:4088]))


def test_only_the_header_itself_matches() -> None:
    data = HEADER.encode()
    assert mismatch(data, HEADER) is None


@pytest.mark.parametrize("seal", [False, True], ids=["as it is", "sealed again"])
def test_no_changed_byte_passes(seal: bool) -> None:
    """Every byte of a header, by every bit and by two more values."""
    data = HEADER.encode()
    chance = random.Random(0)
    for at in range(4088 if seal else 4096):
        changes = {1 << chance.randrange(8), 0xFF, chance.randrange(1, 256)}
        if at < 160:
            changes |= {1 << bit for bit in range(8)}
        for change in changes:
            broken = bytearray(data)
            broken[at] ^= change
            hostile = sealed(broken) if seal else bytes(broken)
            assert mismatch(hostile, HEADER)
            refused(hostile, must=not seal or at >= 160)


def refused(data: bytes, must: bool) -> None:
    """Refused as no header, or read as exactly what it is."""
    try:
        assert decode(data).encode() == data
    except HeaderError:
        return
    assert not must


# What a field may hold that its reader does not expect; where, and what.
HOSTILE = {
    "no layout": (64, bytes(32)),
    "layout of zeros and a letter": (64, bytes(31) + b"a"),
    "layout with a zero inside": (64, b"a\0b".ljust(32, b"\0")),
    "layout that fills its field": (64, b"x" * 32),
    "layout in UTF-8": (64, "bl\u00f6cke/1".encode().ljust(32, b"\0")),
    "layout of no encoding": (64, b"\xff\xfe\x80" * 10 + b"\xff\xff"),
    "no dimensions": (12, b"\0\0"),
    "nine dimensions": (12, b"\x09\0"),
    "65535 dimensions": (12, b"\xff\xff"),
    "a dimension too few": (12, b"\x03\0"),
    "a dimension too many": (12, b"\x05\0"),
    "endless shape": (96, b"\xff" * 64),
    "empty shape": (96, bytes(64)),
    "endless payload": (24, b"\xff" * 8),
    "no payload": (24, bytes(8)),
    "payload of 2**63": (24, bytes(7) + b"\x80"),
    "endless blocks": (16, b"\xff" * 8),
    "unknown type": (10, b"\0\0"),
    "unknown checksum": (14, b"\x02\0"),
    "big-endian version": (8, b"\0\x01"),
    "reserved byte, first": (160, b"\x01"),
    "reserved byte, last": (4087, b"\x01"),
    "reserved bytes, all": (160, b"\xa5" * (4088 - 160)),
    "second header inside": (2048, HEADER.encode()[:160]),
    "another key": (32, b"\0" * 16),
    "no checksum": (48, b"\0" * 16),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_a_mismatch_and_no_error(name: str) -> None:
    at, value = HOSTILE[name]
    body = bytearray(HEADER.encode())
    body[at : at + len(value)] = value
    assert mismatch(sealed(body), HEADER)
    refused(sealed(body), must=False)


@given(st.binary(max_size=4200), st.booleans(), st.booleans())
def test_bytes_of_any_kind_are_a_mismatch_and_no_error(
    data: bytes, magic: bool, seal: bool
) -> None:
    if magic:
        data = HEADER.encode()[:10] + data
    if seal:
        data = sealed(data.ljust(4088, b"\0"))
    assert mismatch(data, HEADER)
    refused(data, must=False)


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
        replace(HEADER, layout=""),
        replace(HEADER, layout="bl\u00f6cke/1"),
        replace(HEADER, layout="a\0"),
        replace(HEADER, checksum_kind="half"),
        replace(HEADER, payload_bytes=-1),
        replace(HEADER, block_size=1 << 64),
        replace(HEADER, shape=(1 << 64,)),
    ):
        with pytest.raises(HeaderError):
            wrong.encode()


def test_the_key_digest() -> None:
    assert key_digest("m@1@0@ff@bfloat16") == (
        hashlib.blake2b(b"m@1@0@ff@bfloat16", digest_size=16).digest()
    )
    assert key_digest("a") != key_digest("b")
