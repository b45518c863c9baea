# SPDX-License-Identifier: Apache-2.0
"""What direct storage must keep, written down a second time and as plainly as can be.

A chunk is named by its path: the tuple of what stands before it, and itself. So the
model knows the prompt of every chunk without being told.
"""

# Standard
from collections import Counter
from collections.abc import Sequence

Path = tuple[int, ...]


def prompt_of(path: Path) -> list[Path]:
    """The chunks of a prompt, the first one first."""
    return [path[:length] for length in range(1, len(path) + 1)]


class PolicyModel:
    """Which chunks are stored, if at most ``most`` may be.

    Args:
        most: Chunks that there is space for.

    Attributes:
        used: Stored chunk -> when it was used last. A use of a chunk is one of all
            before it.
        pins: Chunk -> lookups that want it to stay.
        unplaced: Chunks that were not stored for want of space.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.used: dict[Path, int] = {}
        self.pins: Counter[Path] = Counter()
        self.unplaced = 0
        self._now = 0

    def look_up(self, path: Path, pin: bool) -> int:
        """Count the chunks of a prompt that are stored, up to the first gap."""
        found = self._stored_prefix(prompt_of(path))
        if pin:
            self.pins.update(found)
        self._use(found)
        return len(found)

    def read(self, chunks: Sequence[Path]) -> int:
        """Read chunks of a prompt up to the first that is not stored."""
        found = self._stored_prefix(chunks)
        self._use(found)
        return len(found)

    def unpin(self, chunk: Path) -> None:
        """Take a pin off, whatever became of the chunk since it was pinned."""
        assert self.pins[chunk]
        self.pins[chunk] -= 1

    def remove(self, chunk: Path, force: bool) -> bool:
        """Remove a chunk, a pinned one only by force."""
        if chunk not in self.used or (self.pins[chunk] and not force):
            return False
        del self.used[chunk]
        return True

    def store(self, chunks: Sequence[Path], fails: bool) -> None:
        """Store some chunks of a prompt, as many as find space, or none if it fails."""
        new = [chunk for chunk in chunks if chunk not in self.used]
        placed: list[Path] = []
        for chunk in new:
            if len(self.used) + len(placed) == self.most:
                victim = self._victim(chunk, new)
                if victim is None:
                    break
                del self.used[victim]
            placed.append(chunk)
        self.unplaced += len(new) - len(placed)
        if fails:
            return
        for chunk in placed:
            self.used[chunk] = 0
        self._use(placed)

    def _victim(self, chunk: Path, being_written: Sequence[Path]) -> Path | None:
        before = prompt_of(chunk)[:-1]
        if not all(other in self.used or other in being_written for other in before):
            return None
        may_go = [
            other for other in self.used if not self.pins[other] and other not in before
        ]
        return min(may_go, key=lambda c: (self.used[c], -len(c)), default=None)

    def _stored_prefix(self, chunks: Sequence[Path]) -> list[Path]:
        found = []
        for chunk in chunks:
            if chunk not in self.used:
                break
            found.append(chunk)
        return found

    def _use(self, chunks: Sequence[Path]) -> None:
        self._now += 1
        for chunk in prompt_of(chunks[-1]) if chunks else ():
            if chunk in self.used:
                self.used[chunk] = self._now
