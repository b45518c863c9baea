# SPDX-License-Identifier: Apache-2.0
"""Which chunk is where on the NVMe, and which one goes first; in memory only.

A key is here from the moment its bytes and its header are down until it is evicted,
removed, or found damaged. Its region is given up once nobody reads it any more.

A chunk is of no use without those before it in its prompt, so a use of a chunk is a use
of all of these, and among chunks used at the same time the last of the prompt goes
first. What stands before a key, LMCache tells with every lookup: keys are given in the
order of a prompt.
"""

# Standard
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
import threading

# Third Party
import torch

# First Party
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat

# Local
from .device import Region
from .header import ChunkHeader

#: Keys that are not stored, of which the one before is remembered: those of prompts
#: that are being computed, between the lookup and the store of each chunk.
MOST_EXPECTED = 1 << 16


@dataclass(eq=False)
class Entry:
    """A stored chunk.

    Attributes:
        region: Where it is.
        header: What its header must say.
        shapes: LMCache's shapes of the tensors in it.
        dtypes: Their types.
        fmt: LMCache's format.
        before: Key of the chunk before it in its prompt; ``None`` if there is none, or
            it is not known.
        readers: Reads under way.
        gone: Whether it is out of the index, its region kept for its readers alone.
    """

    region: Region
    header: ChunkHeader
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    fmt: MemoryFormat
    before: CacheEngineKey | None = None
    readers: int = 0
    gone: bool = False


class ChunkIndex:
    """Keys and entries, in the order in which they would be evicted.

    Any number of threads may call. Several keys are given in the order of a prompt.

    Args:
        give_up: Called with a region that is no longer used, without the index's lock
            held.
    """

    def __init__(self, give_up: Callable[[Region], None]) -> None:
        self._give_up = give_up
        # Least recently used first; of one prompt, the end before the beginning.
        self._entries: OrderedDict[CacheEngineKey, Entry] = OrderedDict()
        # Key that is not stored -> the one before it, the newest last.
        self._expected: OrderedDict[CacheEngineKey, CacheEngineKey] = OrderedDict()
        self._writing: set[CacheEngineKey] = set()
        # Lookups that want a key to stay. Not of an entry: of a key that is removed and
        # stored again, a lookup must not take another one's pin off.
        self._pins: Counter[CacheEngineKey] = Counter()
        self._closed = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    # ---- store ----------------------------------------------------------------------

    def claim(self, keys: Sequence[CacheEngineKey]) -> list[bool]:
        """Begin to write keys; returns which are neither stored nor being written."""
        with self._lock:
            self._learn(keys)
            claimed = []
            for key in keys:
                claimed.append(key not in self._entries and key not in self._writing)
                if claimed[-1]:
                    self._writing.add(key)
            return claimed

    def abandon(self, key: CacheEngineKey) -> None:
        """End the writing of a key without storing it."""
        with self._lock:
            self._writing.discard(key)

    def publish(self, stored: Sequence[tuple[CacheEngineKey, Entry]]) -> None:
        """Make keys visible that were claimed; their bytes are down."""
        with self._lock:
            late = [entry for _, entry in stored] if self._closed else []
            for key, entry in stored:
                self._writing.discard(key)
                if not self._closed:
                    entry.before = self._expected.pop(key, None)
                    self._entries[key] = entry
            if stored:
                self._use(stored[-1][0])
        for entry in late:
            self._give_up(entry.region)

    def is_writing(self, key: CacheEngineKey) -> bool:
        """Tell whether a key is being written."""
        return key in self._writing

    def evict(self, room_for: CacheEngineKey) -> Entry | None:
        """Forget the chunk that is worth least.

        Args:
            room_for: The key that needs the space. What stands before it in its prompt
                stays: it would be of no use without. Where some of that is neither
                stored nor being written, it is of no use already.

        Returns:
            The entry, whose region now belongs to the caller; ``None`` if all must
            stay, by pins, readers, or for this key.
        """
        with self._lock:
            needed = set(self._prompt_of(room_for)) - {room_for}
            if not all(key in self._entries or key in self._writing for key in needed):
                return None
            for key, entry in self._entries.items():
                if not (self._pins[key] or entry.readers or key in needed):
                    self._forget(key, entry)
                    return entry
            return None

    # ---- lookup and restore ---------------------------------------------------------

    def count_prefix(
        self, keys: Sequence[CacheEngineKey], pin: bool, limit: int
    ) -> int:
        """Count how many keys in a row are stored, and make them the newest.

        Args:
            keys: The keys.
            pin: Whether to pin those that are counted.
            limit: Most to count.
        """
        with self._lock:
            found = self._stored_prefix(keys, limit)
            if pin:
                self._pins.update(keys[: len(found)])
            return len(found)

    def pin(self, key: CacheEngineKey) -> bool:
        """Keep a key from eviction; False if it is not stored."""
        return self.count_prefix([key], True, 1) == 1

    def unpin(self, key: CacheEngineKey) -> bool:
        """Take one pin off; False if there is none."""
        with self._lock:
            if not self._pins[key]:
                return False
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
            return True

    def begin_reads(self, keys: Sequence[CacheEngineKey]) -> list[Entry]:
        """Take the keys before the first that is not stored, and make them the newest.

        Returns:
            Their entries. The region of each stays until its :meth:`end_read`.
        """
        with self._lock:
            found = self._stored_prefix(keys, len(keys))
            for entry in found:
                entry.readers += 1
            return found

    def end_read(self, entry: Entry) -> None:
        """End a read."""
        with self._lock:
            entry.readers -= 1
            unused = entry.gone and entry.readers == 0
        if unused:
            self._give_up(entry.region)

    # ---- removal --------------------------------------------------------------------

    def remove(
        self, key: CacheEngineKey, force: bool = True, only: Entry | None = None
    ) -> bool:
        """Forget a key.

        Args:
            key: The key.
            force: Whether to do so even if it is pinned.
            only: Do so only if the key still has this entry.

        Returns:
            Whether it was forgotten.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or (only is not None and entry is not only):
                return False
            if self._pins[key] and not force:
                return False
            self._forget(key, entry)
            unused = entry.readers == 0
        if unused:
            self._give_up(entry.region)
        return True

    def clear(self) -> list[Entry]:
        """Forget every key that is not pinned; returns their entries."""
        with self._lock:
            entries = list(self._entries.items())
        return [entry for key, entry in entries if self.remove(key, False, entry)]

    def close(self) -> None:
        """Forget every key, and those that are published from now on."""
        with self._lock:
            self._closed = True
            keys = list(self._entries)
        for key in keys:
            self.remove(key)

    # ---- order; all of it wants the lock --------------------------------------------

    def _learn(self, keys: Sequence[CacheEngineKey]) -> None:
        """Remember for each key which one stands before it."""
        for before, key in pairwise(keys):
            entry = self._entries.get(key)
            if entry is not None:
                entry.before = before
            else:
                self._expect(key, before)

    def _expect(self, key: CacheEngineKey, before: CacheEngineKey) -> None:
        self._expected[key] = before
        self._expected.move_to_end(key)
        if len(self._expected) > MOST_EXPECTED:
            self._expected.popitem(last=False)

    def _prompt_of(self, key: CacheEngineKey) -> Iterator[CacheEngineKey]:
        """A key and those before it, as far as is known, back to the first."""
        seen = set()
        at: CacheEngineKey | None = key
        # Hashes that collide could make a circle.
        while at is not None and at not in seen:
            yield at
            seen.add(at)
            entry = self._entries.get(at)
            at = entry.before if entry is not None else self._expected.get(at)

    def _use(self, key: CacheEngineKey) -> None:
        """Make a key and those before it the newest, the first of all last."""
        for used in self._prompt_of(key):
            if used in self._entries:
                self._entries.move_to_end(used)

    def _stored_prefix(self, keys: Sequence[CacheEngineKey], limit: int) -> list[Entry]:
        """Use the keys before the first that is not stored; returns their entries."""
        self._learn(keys)
        found: list[Entry] = []
        for key in keys[:limit]:
            entry = self._entries.get(key)
            if entry is None:
                break
            found.append(entry)
        if found:
            self._use(keys[len(found) - 1])
        return found

    def _forget(self, key: CacheEngineKey, entry: Entry) -> None:
        del self._entries[key]
        entry.gone = True
        if entry.before is not None:
            self._expect(key, entry.before)
