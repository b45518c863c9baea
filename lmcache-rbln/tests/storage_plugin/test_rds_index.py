# SPDX-License-Identifier: Apache-2.0
"""The index: order of use, pins, readers, and regions given up exactly once."""

# Standard
from typing import Any

# Third Party
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
import pytest
import torch

# First Party
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat
from lmcache_rbln.storage_plugin.rds import index as rds_index
from lmcache_rbln.storage_plugin.rds.device import Region
from lmcache_rbln.storage_plugin.rds.index import ChunkIndex, Entry


def key_of(number: int) -> CacheEngineKey:
    return CacheEngineKey("m", 1, 0, number, torch.bfloat16)


def entry_of(region: Any = None) -> Entry:
    header: Any = None
    return Entry(region or Region(None), header, [], [], MemoryFormat.KV_2LTD)


def store(index: ChunkIndex, *numbers: int) -> list[bool]:
    keys = [key_of(number) for number in numbers]
    claimed = index.claim(keys)
    index.publish(
        [(key, entry_of()) for key, new in zip(keys, claimed, strict=True) if new]
    )
    return claimed


@pytest.fixture
def given_up() -> list[Region]:
    return []


@pytest.fixture
def index(given_up: list[Region]) -> ChunkIndex:
    index = ChunkIndex(given_up.append)
    for number in range(4):
        store(index, number)
    return index


def evicted(index: ChunkIndex) -> list[int]:
    order = list(index._entries)
    gone = []
    while (entry := index.evict(key_of(99))) is not None:
        assert entry.gone
        gone.append(next(k for k in order if k not in index._entries))
        order.remove(gone[-1])
    return [key.chunk_hash for key in gone]


def test_a_key_is_visible_only_when_published() -> None:
    index = ChunkIndex(lambda region: None)
    assert index.claim([key_of(1), key_of(1)]) == [True, False]
    assert index.is_writing(key_of(1))
    assert index.claim([key_of(1)]) == [False]
    assert index.count_prefix([key_of(1)], False, 9) == 0
    index.abandon(key_of(1))
    assert not index.is_writing(key_of(1))
    assert store(index, 1) == [True]
    assert not index.is_writing(key_of(1))
    assert index.count_prefix([key_of(1)], False, 9) == 1
    assert store(index, 1) == [False]


def test_what_is_pinned_stays(index: ChunkIndex) -> None:
    assert index.pin(key_of(1))
    assert index.count_prefix([key_of(1), key_of(2)], True, 9) == 2
    assert not index.pin(key_of(9))
    assert index.unpin(key_of(1))
    assert not index.remove(key_of(1), force=False)
    assert len(index.clear()) == len(index) == 2
    assert index.unpin(key_of(1))
    assert not index.unpin(key_of(1))
    assert evicted(index) == [1]
    assert index.remove(key_of(2))
    assert not index.remove(key_of(2))
    # Another lookup pins what is stored in its place: each takes off its own.
    store(index, 2)
    assert index.pin(key_of(2))
    assert index.unpin(key_of(2))
    assert evicted(index) == []
    assert index.unpin(key_of(2))
    assert evicted(index) == [2] and not index._pins


def test_a_removed_key_keeps_its_region_while_it_is_read(
    index: ChunkIndex, given_up: list[Region]
) -> None:
    [first], [second] = index.begin_reads([key_of(1)]), index.begin_reads([key_of(1)])
    assert first is second
    assert index.remove(key_of(1))
    assert index.begin_reads([key_of(1)]) == []
    index.end_read(first)
    assert not given_up
    index.end_read(first)
    assert given_up == [first.region]


def test_a_late_reader_does_not_remove_the_next_chunk(
    index: ChunkIndex, given_up: list[Region]
) -> None:
    [old] = index.begin_reads([key_of(1)])
    index.remove(key_of(1))
    store(index, 1)
    assert not index.remove(key_of(1), only=old)
    index.end_read(old)
    assert given_up == [old.region]
    assert index.count_prefix([key_of(1)], False, 1) == 1


def test_hashes_that_collide_make_no_endless_prompt(index: ChunkIndex) -> None:
    keys = [key_of(0), key_of(1), key_of(0)]
    assert index.count_prefix(keys, False, 9) == 3
    assert sorted(evicted(index)) == [0, 1, 2, 3]


def test_what_is_expected_is_bounded(
    index: ChunkIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rds_index, "MOST_EXPECTED", 3)
    keys = [key_of(number) for number in range(10, 20)]
    assert index.count_prefix(keys, False, 9) == 0
    assert list(index._expected) == keys[-3:]


def test_after_the_end_nothing_is_kept(
    index: ChunkIndex, given_up: list[Region]
) -> None:
    index.pin(key_of(0))
    index.claim([key_of(9)])
    index.close()
    assert len(index) == 0 and len(given_up) == 4
    late = entry_of()
    index.publish([(key_of(9), late)])
    assert len(index) == 0 and given_up[-1] is late.region


class IndexMachine(RuleBasedStateMachine):
    """Against a plain model: every region is held once, or was given up once."""

    keys = st.integers(0, 5)

    def __init__(self) -> None:
        super().__init__()
        self.free: list[Region] = []
        self.index = ChunkIndex(self.free.append)
        self.made: list[Region] = []
        self.reads: list[Entry] = []

    @rule(number=keys)
    def store(self, number: int) -> None:
        if self.index.claim([key_of(number)]) == [True]:
            if self.free:
                region = self.free.pop()
            else:
                region = Region(None)
                self.made.append(region)
            self.index.publish([(key_of(number), entry_of(region))])

    @rule(number=keys)
    def read(self, number: int) -> None:
        self.reads += self.index.begin_reads([key_of(number)])

    @rule()
    def end(self) -> None:
        if self.reads:
            self.index.end_read(self.reads.pop())

    @rule(number=keys, force=st.booleans())
    def remove(self, number: int, force: bool) -> None:
        self.index.remove(key_of(number), force)

    @rule(number=keys)
    def pin(self, number: int) -> None:
        self.index.pin(key_of(number))

    @rule(number=keys)
    def unpin(self, number: int) -> None:
        self.index.unpin(key_of(number))

    @rule()
    def evict(self) -> None:
        entry = self.index.evict(key_of(99))
        if entry is not None:
            self.free.append(entry.region)

    @rule()
    def clear(self) -> None:
        self.index.clear()

    @invariant()
    def every_region_is_somewhere_once(self) -> None:
        held = [entry.region for entry in self.index._entries.values()]
        late = {id(entry): entry.region for entry in self.reads if entry.gone}
        everywhere = [*held, *self.free, *late.values()]
        assert sorted(map(id, everywhere)) == sorted(map(id, self.made))
        for entry in self.reads:
            assert entry.region not in self.free


TestIndexMachine = IndexMachine.TestCase
