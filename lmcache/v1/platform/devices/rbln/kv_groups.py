# SPDX-License-Identifier: Apache-2.0
"""Which blocks of each KV cache group a transfer moves. No byte moves here.

A group with a sliding window keeps the last blocks of each chunk only, a restore brings
back its last chunks only, and vLLM names the null block where the window has passed:
nothing is read from that block, and nothing written to it.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class KVGroup(Protocol):
    """A group as LMCache's worker registers it.

    Attributes:
        layer_names: Its layers.
        engine_kv_format: Layout of the layers.
        blocks_in_chunk: Blocks that a chunk spans.
        blocks_per_window: How many of them are stored, the last ones.
        window_chunks: Chunks that a restore brings back, the last ones; -1 is all.
    """

    layer_names: list[str]
    engine_kv_format: Any
    blocks_in_chunk: int
    blocks_per_window: int
    window_chunks: int


@dataclass(frozen=True)
class GroupRestore:
    """What a restore writes of one group.

    Attributes:
        group: The group.
        chunks: Which of the request's chunks are wanted.
        block_ids: Blocks that these chunks span.
        skip_tokens: Leading tokens of the chunks that are not written.
    """

    group: KVGroup
    chunks: range
    block_ids: list[int]
    skip_tokens: int


@dataclass(frozen=True)
class KVGroups:
    """The groups of a KV cache.

    Attributes:
        groups: In the order in which transfers name their blocks.
        chunk_tokens: Tokens of a chunk, if there are several groups.
        null_block: Block of the engine that holds no tokens; None if there is none.
    """

    groups: Sequence[KVGroup]
    chunk_tokens: int = 0
    null_block: int | None = None

    @property
    def have_windows(self) -> bool:
        """Whether a group has a sliding window."""
        return any(group.window_chunks >= 0 for group in self.groups)

    def to_restore(
        self, block_ids: Sequence[Sequence[int]], skip_tokens: int
    ) -> list[GroupRestore]:
        """Return what a restore writes of each group.

        Args:
            block_ids: Blocks of the whole request, by group.
            skip_tokens: Leading tokens of the request that are not written.

        Raises:
            ValueError: There are blocks of other groups, or no whole chunks, or a null
                block behind one to write.
        """
        return [
            self._to_restore(group, ids, skip_tokens)
            for group, ids in zip(self.groups, block_ids, strict=True)
        ]

    def not_to_store(self, block_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return which chunks of each group lack a block that they would hold.

        A chunk is found by its prefix alone: by requests too that need this block.

        Args:
            block_ids: Blocks of the whole request, by group.
        """
        return [
            [
                chunk
                for chunk in range(len(ids) // group.blocks_in_chunk)
                if any(ids[at] == self.null_block for at in _held(group, chunk))
            ]
            for group, ids in zip(self.groups, block_ids, strict=True)
        ]

    def _to_restore(
        self, group: KVGroup, block_ids: Sequence[int], skip_tokens: int
    ) -> GroupRestore:
        count, rest = divmod(len(block_ids), group.blocks_in_chunk)
        if rest:
            raise ValueError(
                f"{len(block_ids)} blocks, wanted whole chunks of "
                f"{group.blocks_in_chunk} blocks"
            )
        window = group.window_chunks if group.window_chunks >= 0 else count
        chunks = range(max(0, count - window), count)
        held = [at for chunk in chunks for at in _held(group, chunk)]
        nulls = [at for at in held if block_ids[at] == self.null_block]
        if nulls:
            block_tokens = self.chunk_tokens // group.blocks_in_chunk
            skipped = skip_tokens // block_tokens
            if any(skipped <= at < nulls[-1] and at not in nulls for at in held):
                raise ValueError(
                    f"block ids {list(block_ids)} have the null block "
                    f"{self.null_block} behind one to restore; wanted it in front "
                    "only, where a window has passed"
                )
            skip_tokens = max(skip_tokens, (nulls[-1] + 1) * block_tokens)
        return GroupRestore(
            group,
            chunks,
            list(block_ids[chunks.start * group.blocks_in_chunk :]),
            max(0, skip_tokens - chunks.start * self.chunk_tokens),
        )


def _held(group: KVGroup, chunk: int) -> range:
    """Return the positions of the blocks that a chunk holds, its last ones."""
    end = (chunk + 1) * group.blocks_in_chunk
    return range(end - group.blocks_per_window, end)
