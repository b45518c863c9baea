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
        layer_names: The layers.
        engine_kv_format: Layout of the layers.
        chunks: Which of the request's chunks are wanted.
        block_ids: Blocks that these chunks span.
        blocks_in_chunk: Blocks that a chunk spans.
        blocks_per_window: How many of them it holds, the last ones.
        skip_tokens: Leading tokens of the chunks that are not written.
    """

    layer_names: Sequence[str]
    engine_kv_format: Any
    chunks: range
    block_ids: list[int]
    blocks_in_chunk: int
    blocks_per_window: int
    skip_tokens: int


def restore_of(
    group: KVGroup,
    block_ids: Sequence[int],
    skip_tokens: int,
    chunk_tokens: int,
    null_block: int,
) -> GroupRestore:
    """Return what a restore writes of a group.

    Args:
        group: The group.
        block_ids: Blocks of the whole request.
        skip_tokens: Leading tokens of the request that are not written.
        chunk_tokens: Tokens of a chunk.
        null_block: Block of the engine that holds no tokens.

    Raises:
        ValueError: There are no whole chunks, or a null block behind one to write.
    """
    spans, holds = group.blocks_in_chunk, group.blocks_per_window
    count, rest = divmod(len(block_ids), spans)
    if rest:
        raise ValueError(
            f"{len(block_ids)} blocks, wanted whole chunks of {spans} blocks"
        )
    first = max(0, count - group.window_chunks) if group.window_chunks >= 0 else 0
    wanted = list(block_ids[first * spans :])
    block_tokens = chunk_tokens // spans
    skip = max(0, skip_tokens - first * chunk_tokens)
    held = [at for at in range(len(wanted)) if at % spans >= spans - holds]
    nulls = [at for at in held if wanted[at] == null_block]
    if nulls:
        if any(
            skip // block_tokens <= at < nulls[-1] for at in held if at not in nulls
        ):
            raise ValueError(
                f"block ids {wanted} have the null block {null_block} behind one to "
                "restore; wanted it in front only, where a window has passed"
            )
        skip = max(skip, (nulls[-1] + 1) * block_tokens)
    return GroupRestore(
        group.layer_names,
        group.engine_kv_format,
        range(first, count),
        wanted,
        spans,
        holds,
        skip,
    )


def chunks_not_stored(
    group: KVGroup, block_ids: Sequence[int], null_block: int
) -> list[int]:
    """Return the chunks of a store that lack a block which they would hold.

    A chunk is found by its prefix, whatever of it the next request still has in its
    window.

    Args:
        group: The group.
        block_ids: Blocks of the whole request.
        null_block: Block of the engine that holds no tokens.
    """
    spans, holds = group.blocks_in_chunk, group.blocks_per_window
    ends = range(spans, len(block_ids) + 1, spans)
    return [
        chunk
        for chunk, end in enumerate(ends)
        if null_block in block_ids[end - holds : end]
    ]
