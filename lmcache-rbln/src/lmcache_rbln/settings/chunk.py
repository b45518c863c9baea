# SPDX-License-Identifier: Apache-2.0
"""Chunks hold whole blocks."""


def fitting_chunk_size(chunk_size: int, block_size: int) -> int:
    """Return the smallest whole number of blocks that holds what was asked for.

    Args:
        chunk_size: LMCache's chunk size as it was set, in tokens.
        block_size: vLLM's block size, in tokens; 1 or more.
    """
    return max(1, -(-chunk_size // block_size)) * block_size
