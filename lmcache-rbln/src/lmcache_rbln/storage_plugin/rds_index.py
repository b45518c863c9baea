# SPDX-License-Identifier: Apache-2.0
"""Which chunk is where on the NVMe, in the order of use; in memory only.

A key is here from the moment its bytes and its header are down until it is evicted,
removed, or found damaged. Its region is given up once nobody reads it any more.
"""

# Standard
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
import threading

# Third Party
import torch

# First Party
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat

# Local
from .rds_device import Region
from .rds_header import ChunkHeader


@dataclass(eq=False)
class Entry:
    """A stored chunk.

    Attributes:
        region: Where it is.
        header: What its header must say.
        shapes: LMCache's shapes of the tensors in it.
        dtypes: Their types.
        fmt: LMCache's format.
        pins: Lookups that want it to stay.
        readers: Reads under way.
        gone: Whether it is out of the index, its region kept for its readers alone.
    """

    region: Region
    header: ChunkHeader
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    fmt: MemoryFormat
    pins: int = 0
    readers: int = 0
    gone: bool = False


class ChunkIndex:
    """Keys and entries, least recently used first.

    Args:
        give_up: Called with a region that is no longer used, without the index's lock
            held.
    """

    def __init__(self, give_up: Callable[[Region], None]) -> None:
        self._give_up = give_up
        self._entries: OrderedDict[CacheEngineKey, Entry] = OrderedDict()
        self._writing: set[CacheEngineKey] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def claim(self, key: CacheEngineKey) -> bool:
        """Begin to write a key; False if it is stored or being written already."""
        with self._lock:
            if key in self._entries or key in self._writing:
                return False
            self._writing.add(key)
            return True

    def abandon(self, key: CacheEngineKey) -> None:
        """End the writing of a key without storing it."""
        with self._lock:
            self._writing.discard(key)

    def publish(self, key: CacheEngineKey, entry: Entry) -> None:
        """Make a key visible; its bytes are down."""
        with self._lock:
            self._writing.discard(key)
            self._entries[key] = entry

    def is_writing(self, key: CacheEngineKey) -> bool:
        """Tell whether a key is being written."""
        with self._lock:
            return key in self._writing

    def count_prefix(self, keys: list[CacheEngineKey], pin: bool, limit: int) -> int:
        """Count how many keys in a row are stored, and make them the newest.

        Args:
            keys: Keys in the order of a prompt.
            pin: Whether to pin those that are counted.
            limit: Most to count.
        """
        with self._lock:
            found = []
            for key in keys[:limit]:
                entry = self._entries.get(key)
                if entry is None:
                    break
                found.append(key)
                if pin:
                    entry.pins += 1
            # The end of a prompt goes first when space is needed: a chunk is of no
            # use without those before it.
            for key in reversed(found):
                self._entries.move_to_end(key)
            return len(found)

    def pin(self, key: CacheEngineKey) -> bool:
        """Keep a key from eviction; False if it is not stored."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return False
            entry.pins += 1
            return True

    def unpin(self, key: CacheEngineKey) -> bool:
        """Take one pin off; False if there is none."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.pins == 0:
                return False
            entry.pins -= 1
            return True

    def begin_read(self, key: CacheEngineKey) -> Entry | None:
        """Take an entry for reading; its region stays until :meth:`end_read`."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            entry.readers += 1
            self._entries.move_to_end(key)
            return entry

    def end_read(self, entry: Entry) -> None:
        """End a read."""
        with self._lock:
            entry.readers -= 1
            unused = entry.gone and entry.readers == 0
        if unused:
            self._give_up(entry.region)

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
            if entry.pins and not force:
                return False
            del self._entries[key]
            entry.gone = True
            unused = entry.readers == 0
        if unused:
            self._give_up(entry.region)
        return True

    def evict(self) -> Entry | None:
        """Forget the least recently used key without pins and readers.

        Returns:
            Its entry, whose region now belongs to the caller; ``None`` if there is no
            such key.
        """
        with self._lock:
            for key, entry in self._entries.items():
                if entry.pins == 0 and entry.readers == 0:
                    del self._entries[key]
                    entry.gone = True
                    return entry
            return None

    def clear(self) -> list[Entry]:
        """Forget every key that is not pinned; returns their entries."""
        with self._lock:
            cleared = [(k, e) for k, e in self._entries.items() if not e.pins]
        return [entry for key, entry in cleared if self.remove(key, False, only=entry)]
