# SPDX-License-Identifier: Apache-2.0
"""The KV blocks that an engine stored and restored, and LMCache's copy of them."""

# Standard
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
import mmap

# Third Party
import torch

# A block with its head-major planes is [2, heads, 1, block size, head size]; an MLA
# block is [block size, latent size].
MLA_BLOCK_DIMS = 2


@dataclass(frozen=True)
class Transfer:
    """One store or load, as the engine's probe wrote it down.

    Attributes:
        direction: ``STORE`` or ``RETRIEVE``.
        token_ids: Tokens of the request so far.
        start: First token that was moved.
        end: One past the last token that was moved.
        block_ids: The engine's blocks of these tokens.
        blocks: Their bytes, ``[layers, blocks, *block]``.
    """

    direction: str
    token_ids: tuple[int, ...]
    start: int
    end: int
    block_ids: tuple[int, ...]
    blocks: torch.Tensor


def read_transfers(folder: Path, skip: int = 0) -> list[Transfer]:
    """Read the transfers written down so far, oldest first.

    Args:
        folder: Where the probe writes.
        skip: Number of transfers to leave out at the beginning.
    """
    transfers = []
    for path in sorted(folder.glob("*.pt"))[skip:]:
        saved = torch.load(path, weights_only=True)
        transfers.append(
            Transfer(
                direction=saved["direction"],
                token_ids=tuple(saved["token_ids"]),
                start=saved["start"],
                end=saved["end"],
                block_ids=tuple(saved["block_ids"]),
                blocks=saved["blocks"],
            )
        )
    return transfers


def blocks_of(
    transfers: Sequence[Transfer],
    direction: str,
    prompt: Sequence[int],
    block_size: int,
) -> torch.Tensor:
    """Join the blocks that were last moved for a prompt, from its first token on.

    Args:
        transfers: What the probe wrote down; a prompt may be stored in pieces.
        direction: ``STORE`` or ``RETRIEVE``.
        prompt: Tokens of the prompt.
        block_size: Tokens per block.

    Returns:
        ``[layers, blocks, *block]``.

    Raises:
        AssertionError: If nothing was moved, or with gaps.
    """
    length = len(prompt)
    pieces = [
        transfer
        for transfer in transfers
        if transfer.direction == direction
        and transfer.token_ids[:length] == tuple(prompt)
    ]
    starts = [number for number, piece in enumerate(pieces) if piece.start == 0]
    assert starts, f"the engine wrote down no {direction} of this prompt"
    pieces = pieces[starts[-1] :]
    position = 0
    for piece in pieces:
        assert piece.start == position, (
            f"{direction} pieces are not consecutive: wanted token {position}, "
            f"got {piece.start}"
        )
        assert len(piece.block_ids) * block_size == piece.end - piece.start
        position = piece.end
    return torch.cat([piece.blocks for piece in pieces], dim=1)


def assert_same_blocks(cold: torch.Tensor, warm: torch.Tensor) -> None:
    """Compare blocks byte by byte.

    Args:
        cold: Blocks that the engine computed, ``[layers, blocks, *block]``.
        warm: Blocks that were restored.

    Raises:
        AssertionError: If a byte differs, naming how many and where first.
    """
    assert cold.shape == warm.shape, f"{tuple(cold.shape)} != {tuple(warm.shape)}"
    assert cold.dtype == warm.dtype
    different = as_bytes(cold) != as_bytes(warm)
    if different.any():
        per_block = different.flatten(2).any(dim=2)
        layer, block = (int(i) for i in per_block.nonzero()[0])
        raise AssertionError(
            f"{int(different.sum())} of {different.numel()} bytes differ in "
            f"{int(per_block.sum())} of {per_block.numel()} blocks, first in layer "
            f"{layer}, block {block}"
        )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's elements as bytes, so that NaN equals itself."""
    return tensor.contiguous().view(torch.uint8)


def chunks_of(blocks: torch.Tensor, blocks_per_chunk: int) -> list[torch.Tensor]:
    """Build LMCache's chunks from blocks, one element at a time in its axes.

    Args:
        blocks: ``[layers, blocks, 2, heads, 1, block size, head size]``, or
            ``[layers, blocks, block size, latent size]`` for MLA.
        blocks_per_chunk: Blocks in a chunk.

    Returns:
        Token-major chunks ``[2, layers, tokens, heads * head size]``, or
        ``[layers, tokens, latent size]``.
    """
    chunks = []
    for first in range(0, blocks.shape[1], blocks_per_chunk):
        part = blocks[:, first : first + blocks_per_chunk]
        if blocks.dim() - 2 == MLA_BLOCK_DIMS:
            chunks.append(part.flatten(1, 2).contiguous())
            continue
        layers, count, planes, heads, _, block_size, head_size = part.shape
        chunk = torch.empty(
            planes, layers, count * block_size, heads * head_size, dtype=blocks.dtype
        )
        for block in range(count):
            for head in range(heads):
                tokens = slice(block * block_size, (block + 1) * block_size)
                values = slice(head * head_size, (head + 1) * head_size)
                for plane in range(planes):
                    chunk[plane, :, tokens, values] = part[:, block, plane, head, 0]
        chunks.append(chunk)
    return chunks


class StoredChunk:
    """A chunk in the server's shared memory, open for reading and tampering.

    Args:
        segment: File of the shared-memory segment.
        chunk: Bytes that must be there; they say where the chunk lies.

    Raises:
        AssertionError: If the bytes are not in the segment, or more than once.
    """

    def __init__(self, segment: Path, chunk: torch.Tensor) -> None:
        self._segment = segment
        self._original = as_bytes(chunk).numpy().tobytes()
        self._like = chunk
        with (
            segment.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
        ):
            self._offset = memory.find(self._original)
            assert self._offset >= 0, "the chunk is not in the server's memory"
            again = memory.find(self._original, self._offset + 1)
            assert again < 0, "the chunk is in the server's memory twice"

    def read(self) -> torch.Tensor:
        """Copy the chunk out."""
        with self._segment.open("rb") as file:
            file.seek(self._offset)
            data = bytearray(file.read(len(self._original)))
        return torch.frombuffer(data, dtype=self._like.dtype).view(self._like.shape)

    def write(self, chunk: torch.Tensor) -> None:
        """Overwrite the chunk behind LMCache's back."""
        assert chunk.shape == self._like.shape and chunk.dtype == self._like.dtype
        data = as_bytes(chunk).numpy().tobytes()
        with self._segment.open("r+b") as file:
            file.seek(self._offset)
            file.write(data)

    def repair(self) -> None:
        """Put the original bytes back."""
        self.write(self._like)
