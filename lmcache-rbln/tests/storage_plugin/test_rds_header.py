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
from lmcache_rbln.storage_plugin.rds.header import (
    HEADER_BYTES,
    ChunkHeader,
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


@given(st.binary(max_size=4200), st.booleans(), st.booleans())
def test_bytes_of_any_kind_are_a_mismatch_and_no_error(
    data: bytes, magic: bool, seal: bool
) -> None:
    if magic:
        data = HEADER.encode()[:10] + data
    if seal:
        data = sealed(data.ljust(4088, b"\0"))
    assert mismatch(data, HEADER)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no chunk begins"),
        (bytes(4096), "no chunk begins"),
        (HEADER.encode()[:-1], "is not the one that was written"),
        (HEADER.encode()[:2048] + bytes(2048), "is not the one that was written"),
    ],
)
def test_what_is_no_header(data: bytes, why: str) -> None:
    assert why in str(mismatch(data, HEADER))


def test_a_dtype_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch.complex64 has no number"):
        replace(HEADER, dtype=torch.complex64).encode()


def test_the_key_digest() -> None:
    assert key_digest("m@1@0@ff@bfloat16") == (
        hashlib.blake2b(b"m@1@0@ff@bfloat16", digest_size=16).digest()
    )
    assert key_digest("a") != key_digest("b")
