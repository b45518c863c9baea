# SPDX-License-Identifier: Apache-2.0
"""What is read is what was written, or a miss: damage of every kind."""

# Standard
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any
from unittest.mock import MagicMock
import os

# Third Party
from rds_support import (
    CHUNK_BYTES,
    DAMAGE,
    REGION_BYTES,
    MakeEngine,
    Storage,
    content_of,
    damage,
    key_of,
    put,
)
import pytest
import torch
import xxhash

# First Party
from lmcache.v1.platform.devices.rbln.device_ops import RblnDeviceOps
from lmcache.v1.platform.devices.rbln.block_transfer import StillInFlightError
from lmcache_rbln.storage_plugin.rds import chunk_io
from lmcache_rbln.storage_plugin.rds.header import ChunkHeader

pytestmark = pytest.mark.npu


@pytest.mark.sim
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_chunk_is_a_miss_and_is_dropped(
    engine: MakeEngine, kind: str
) -> None:
    one = engine()
    one.store(0, 1)
    rejected = one.metric("rejected_chunks")
    damage(one, 0, DAMAGE[kind])
    assert one.load(0) == [False]
    assert one.metric("rejected_chunks") == rejected + 1
    assert one.holds(0, 1) == [False, True]
    assert one.load(1) == [True]
    one.store(0)
    assert one.load(0) == [True]
    one.assert_idle()


OTHER: dict[str, Any] = {
    "key": bytes(16),
    "payload_bytes": CHUNK_BYTES - 4096,
    "shape": (2, 2, 128, 127),
    "dtype": torch.float16,
    "layout": "rbln-blocks-first-hnd/1",
    "block_size": 64,
    "checksum_kind": "header",
    "checksum": bytes(16),
}


@pytest.mark.sim
@pytest.mark.parametrize("field", [field.name for field in fields(ChunkHeader)])
def test_a_sound_header_that_says_anything_else_is_a_miss(
    engine: MakeEngine, field: str
) -> None:
    one = engine()
    one.store(0)
    rejected = one.metric("rejected_chunks")
    header = one.backend._store.index._entries[key_of(0)].header
    other = replace(header, **{field: OTHER[field]})
    damage(one, 0, put(slice(4096), other.encode()))
    assert one.load(0) == [False]
    assert one.metric("rejected_chunks") == rejected + 1
    assert one.holds(0) == [False]
    one.assert_idle()


HOSTILE: dict[str, tuple[int, bytes]] = {
    "version": (8, b"\x02"),
    "checksum kind": (14, b"\x02"),
    "blocks": (16, b"\xff" * 8),
    "another key": (32, bytes(16)),
    "shape": (96, b"\xff" * 64),
    "layout that is no text": (64, b"\xff\xfe\x80" * 10 + b"\xff\xff"),
    "layout that is empty": (64, bytes(32)),
    "dimensions": (12, b"\xff\xff"),
    "type": (10, b"\xff\xff"),
    "length": (24, b"\xff" * 8),
    "reserved byte": (4087, b"\x01"),
}


@pytest.mark.sim
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_hostile_header_costs_its_chunk_alone(
    engine: MakeEngine, name: str, place: int
) -> None:
    """Its seal fits: somebody made it so."""
    one = engine()
    one.store(0, 1, 2)
    rejected = one.metric("rejected_chunks")
    at, value = HOSTILE[name]

    def change(data: bytearray) -> None:
        data[at : at + len(value)] = value
        data[4088:4096] = xxhash.xxh3_64_digest(data[:4088])[::-1]

    damage(one, place, change)
    came = [number != place for number in range(3)]
    assert one.load(0, 1, 2) == came
    assert one.metric("rejected_chunks") == rejected + 1
    assert one.holds(0, 1, 2) == came
    one.assert_idle()


def test_whatever_verification_raises_is_a_miss_of_that_chunk(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine()
    one.store(0, 1, 2)
    failures = one.metric("read_failures")
    header = one.backend._store.index._entries[key_of(1)].header
    encode = ChunkHeader.encode

    def broken(self: ChunkHeader) -> bytes:
        if self is header:
            raise ArithmeticError("planted")
        return encode(self)

    monkeypatch.setattr(ChunkHeader, "encode", broken)
    assert one.load(0, 1, 2) == [True, False, True]
    assert one.metric("read_failures") == failures + 1
    assert one.holds(0, 1, 2) == [True, False, True]
    one.assert_idle()


@pytest.mark.sim
@pytest.mark.parametrize("read", [1, 2, 3, 6])
def test_a_read_that_fails_costs_its_chunk_alone(
    engine: MakeEngine, storage: Storage, read: int
) -> None:
    storage.use(faults=f"eio:read:{read}")
    one = engine()
    one.store(0, 1, 2)
    failures = one.metric("read_failures")
    came = [number != (read - 1) // 2 for number in range(3)]  # two reads each
    assert one.load(0, 1, 2) == came
    assert one.metric("read_failures") == failures + 1
    assert one.holds(0, 1, 2) == came
    one.assert_idle()


@pytest.mark.parametrize("bad", ["damaged", "unreadable"])
def test_a_region_that_failed_is_not_handed_out_again(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    one = engine()
    one.store(0, 1)
    region = one.region(1)
    released: list[Any] = []
    monkeypatch.setattr(one.backend._device, "release", released.append)
    if bad == "damaged":
        damage(one, 1, DAMAGE["poison"])
        assert one.load(0, 1) == [True, False]
    else:

        def fail(item: Any) -> str | None:
            raise RuntimeError("planted")

        with monkeypatch.context() as planted:
            planted.setattr(one.backend._store.io, "_mismatch", fail)
            assert one.load(1) == [False]
    assert released == [region]
    held = one.backend._store._regions.held_bytes
    one.store(1)
    assert one.region(1) is not region
    assert one.backend._store._regions.held_bytes == held + REGION_BYTES
    one.backend.remove(key_of(1))
    assert released == [region]  # a sound one is kept


@pytest.mark.sim
@pytest.mark.parametrize("left", [0, 4096, REGION_BYTES // 2, REGION_BYTES - 4096])
def test_a_chunk_cut_short_is_a_miss(
    engine: MakeEngine, storage: Storage, left: int
) -> None:
    """The device ends inside of the chunk: its reads fail."""
    one = engine()
    one.store(0, 1)
    failures = one.metric("read_failures")
    path, start = one.region(1).chunk.sim_location
    os.truncate(path, start + left)
    assert one.load(1) == [False]
    assert one.metric("read_failures") == failures + 1
    assert one.holds(0, 1) == [True, False]
    assert one.load(0) == [True]
    one.store(1)
    assert one.load(1) == [True]
    one.assert_idle()


@pytest.mark.sim
@pytest.mark.parametrize("part", ["whole", "header", "payload"])
def test_swapped_chunks_are_misses(engine: MakeEngine, part: str) -> None:
    one = engine()
    one.store(0, 1, 2)
    places = {"whole": slice(None), "header": slice(4096), "payload": slice(4096, None)}
    held: list[bytes] = []
    for number in (0, 1):
        damage(one, number, lambda data: held.append(bytes(data[places[part]])))
    for number in (0, 1):
        other = held[1 - number]
        damage(one, number, put(places[part], other))
    assert one.load(0) == [False]
    assert one.load(1) == [False]
    assert one.load(2) == [True]
    one.assert_idle()


@pytest.mark.sim
def test_an_old_chunk_of_the_same_key_is_a_miss(engine: MakeEngine) -> None:
    """A write that the NVMe lost although it reported success."""
    one = engine({"rds_max_chunks": 1})
    one.store(0)
    old: list[bytes] = []
    damage(one, 0, lambda data: old.append(bytes(data)))
    one.backend.remove(key_of(0))
    obj = one.chunk(5)  # other bytes under the same key
    futures = one.backend.batched_submit_put_task([key_of(0)], [obj])
    obj.ref_count_down()
    assert futures is not None
    futures[0].result(timeout=10)
    damage(one, 0, put(slice(None), old[0]))
    assert one.backend.get_blocking(key_of(0)) is None


@pytest.mark.sim
@pytest.mark.parametrize("position", [1, 2, 3, 4])
def test_a_torn_write_is_a_miss(
    engine: MakeEngine, storage: Storage, position: int
) -> None:
    storage.use(faults=f"torn:write:{position}")
    one = engine()
    one.store(0)
    one.store(1)
    # A header is one sector: torn is not written at all.
    came = [one.load(0)[0], one.load(1)[0]]
    assert came == [position not in (1, 2), position not in (3, 4)]
    one.assert_idle()


@pytest.mark.sim
def test_checksum_header_finds_headers_alone(
    engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    one = engine({"rds_checksum": "header"})
    one.store(0, 1)
    assert one.load(0) == [True]
    damage(one, 0, DAMAGE["header zero"])
    damage(one, 1, DAMAGE["last sector missing"])
    assert one.load(0) == [False]
    obj = one.backend.get_blocking(key_of(1))
    assert obj is not None  # what the setting gives up
    obj.ref_count_down()


# ---- checksums ----------------------------------------------------------------------


@pytest.fixture
def io(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Small tiles, and a chunk of five of them and its bytes."""
    one = engine({"rds_buffer_size": 1})
    monkeypatch.setattr(one.backend._store.io, "_tile_bytes", CHUNK_BYTES // 4)
    return one.backend._store.io, one.chunk(7)


@pytest.mark.deferred
@pytest.mark.parametrize(
    "nbytes", [1, 4095, 4096, 8193, CHUNK_BYTES // 4, CHUNK_BYTES // 2 + 7, CHUNK_BYTES]
)
def test_a_checksum_is_of_exactly_the_first_bytes(
    io: tuple[Any, Any], nbytes: int
) -> None:
    chunk_io, obj = io
    want = xxhash.xxh3_128(content_of(7)[:nbytes]).digest()

    def digest(number: int) -> bytes:
        with torch.inference_mode(number % 2 == 0):
            return chunk_io._digest(obj, nbytes)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(digest, range(16))) == {want}
    obj.ref_count_down()


def test_memory_with_copies_under_way_is_not_used_again(
    io: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk_io_, obj = io

    def fail(*arguments: Any) -> None:
        raise StillInFlightError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(RblnDeviceOps, "multi_layer_block_kv_transfer", fail)
        for _ in range(2 * chunk_io.MAX_HASHERS):
            with pytest.raises(StillInFlightError):
                chunk_io_._digest(obj, CHUNK_BYTES)
    assert obj.retired
    obj.retired = False
    with monkeypatch.context() as planted:
        interrupt = MagicMock(side_effect=KeyboardInterrupt)
        host = torch.empty(4096, dtype=torch.uint8)
        planted.setattr(RblnDeviceOps, "multi_layer_block_kv_transfer", interrupt)
        with pytest.raises(KeyboardInterrupt):
            chunk_io_._copy([obj], [obj.slot.header], host, to_host=True)
    assert obj.retired
    assert len(chunk_io_._lost) == 2 * chunk_io.MAX_HASHERS
    want = xxhash.xxh3_128(content_of(7)).digest()
    assert chunk_io_._digest(obj, CHUNK_BYTES) == want
    obj.ref_count_down()


def test_hashers_outlive_memory_that_is_short(
    io: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is lost is missed by every later checksum."""
    chunk_io_, obj = io
    empty = torch.empty

    def fail(*arguments: Any, **options: Any) -> torch.Tensor:
        if options.get("pin_memory"):
            raise RuntimeError("planted")
        return empty(*arguments, **options)

    with monkeypatch.context() as planted:
        planted.setattr(torch, "empty", fail)
        with pytest.raises(RuntimeError, match="planted"):
            chunk_io_._digest(obj, CHUNK_BYTES)
    assert chunk_io_._tiles.qsize() == chunk_io.MAX_HASHERS
    obj.ref_count_down()
