# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a KV cache group a transfer moves."""

# Standard
from types import SimpleNamespace
from typing import Any

# Third Party
import pytest

# First Party
from lmcache.v1.platform.devices.rbln.kv_groups import KVGroups

CHUNK = 64


def group(blocks: int, held: int, window_chunks: int) -> Any:
    """A group of ``blocks`` a chunk, of which the last ``held`` are stored."""
    return SimpleNamespace(
        layer_names=["a"],
        engine_kv_format=None,
        blocks_in_chunk=blocks,
        blocks_per_window=held,
        window_chunks=window_chunks,
    )


def alone(kept: Any) -> KVGroups:
    """One group, in a KV cache whose null block is 0."""
    return KVGroups([kept], CHUNK, 0)


FULL = group(4, 4, -1)
#: A window of two chunks and a bit less, and one of half a chunk.
LARGE, SMALL = group(4, 4, 2), group(4, 2, 1)


@pytest.mark.parametrize(
    "kept, blocks, chunks",
    [
        (FULL, range(1, 13), []),
        (FULL, [1, 2, 3, 4, 5, 0, 7, 8], [1]),
        (LARGE, [0, 0, 0, 0, 0, 6, 7, 8, 9, 10, 11, 12], [0, 1]),
        # The first two blocks of a chunk are not stored in any case.
        (SMALL, [0, 0, 3, 4, 0, 0, 0, 8], [1]),
        (SMALL, [1, 2, 3], []),
    ],
)
def test_a_chunk_that_lacks_a_block_is_not_stored(
    kept: Any, blocks: list[int], chunks: list[int]
) -> None:
    assert alone(kept).not_to_store([blocks]) == [chunks]


@pytest.mark.parametrize(
    "kept, blocks, skip, first, wanted",
    [
        (FULL, range(1, 9), 0, 0, 0),
        (FULL, range(1, 9), 48, 0, 48),
        (LARGE, range(1, 13), 0, 1, 0),
        (LARGE, range(1, 13), 48, 1, 0),
        (LARGE, range(1, 13), 96, 1, 32),
        (LARGE, [0, 0, 0, 0, 0, 0, 7, 8, 9, 10, 11, 12], 0, 1, 32),
        (LARGE, [0, 0, 0, 0, 0, 0, 7, 8, 9, 10, 11, 12], 112, 1, 48),
        (SMALL, [0, 0, 0, 0, 0, 0, 7, 8], 0, 1, 0),
        (SMALL, [0, 0, 0, 0, 0, 0, 0, 8], 0, 1, 48),
    ],
)
def test_what_a_restore_writes(
    kept: Any, blocks: list[int], skip: int, first: int, wanted: int
) -> None:
    [part] = alone(kept).to_restore([blocks], skip)
    assert part.chunks == range(first, len(blocks) // 4)
    assert part.block_ids == list(blocks)[4 * first :]
    assert part.skip_tokens == wanted


def test_what_is_no_whole_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match="5 blocks, wanted whole chunks of 4"):
        alone(FULL).to_restore([range(1, 6)], 0)


@pytest.mark.parametrize("kept", [FULL, LARGE])
def test_a_null_block_behind_one_to_restore_is_refused(kept: Any) -> None:
    blocks = [1, 2, 0, 4]
    with pytest.raises(ValueError, match="null block 0 behind one to restore"):
        alone(kept).to_restore([blocks], 16)
    [part] = alone(kept).to_restore([blocks], 32)
    assert part.skip_tokens == 48


def test_blocks_of_more_groups_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match="longer than"):
        alone(FULL).to_restore([[1, 2, 3, 4]] * 2, 0)


def test_the_only_group_of_a_kv_cache_has_no_null_block() -> None:
    [part] = KVGroups([FULL]).to_restore([[3, 0, 1, 2]], 16)
    assert (part.block_ids, part.skip_tokens) == ([3, 0, 1, 2], 16)
