# SPDX-License-Identifier: Apache-2.0
"""What the block transfer benchmark measures: models, cases and rows. Pure."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any
import itertools

MLA = "mla"
BLOCKS_FIRST = "blocks-first"
KV_FIRST = "K/V-first"
GATHER = "gather"
SCATTER = "scatter"
DIRECTIONS = (GATHER, SCATTER)
ITEM_BYTES = {"bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class Model:
    """KV geometry of a model on one NPU.

    Attributes:
        name: Its name.
        layers: Layers with a KV cache.
        heads: KV heads on this NPU, 1 for MLA.
        head_size: Elements of a head; of the latent row for MLA.
        mla: Whether it has one latent plane in place of K and V.
    """

    name: str
    layers: int
    heads: int
    head_size: int
    mla: bool = False

    @property
    def planes(self) -> int:
        """1 for MLA, else 2."""
        return 1 if self.mla else 2

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layouts in which vLLM-RBLN may allocate the KV cache."""
        return (MLA,) if self.mla else (BLOCKS_FIRST, KV_FIRST)


MODELS = {
    model.name: model
    for model in (
        Model("Qwen3-1.7B", 28, 8, 128),
        Model("Llama-3.1-8B", 32, 8, 128),
        Model("Llama-3.1-70B TP8", 80, 1, 128),
        # Multi-head attention without groups: as many KV heads as query heads.
        Model("LLaMA-65B", 80, 64, 128),
        Model("GPT-NeoX-20B", 44, 64, 96),
        Model("DeepSeek-V3", 61, 1, 576, mla=True),
    )
}


@dataclass(frozen=True)
class Case:
    """One call of the block transfer, timed in both directions and all layouts.

    Attributes:
        model: Name of the model.
        block_size: Tokens per block.
        blocks: Blocks of the call.
        blocks_per_chunk: Blocks of one chunk.
        dtype: ``bf16`` or ``fp8``.
        threads: Threads that transfer at the same time, each its own blocks.
        adjacent: Whether the block ids follow each other; else none of them do.
    """

    model: str
    block_size: int
    blocks: int
    blocks_per_chunk: int
    dtype: str = "bf16"
    threads: int = 1
    adjacent: bool = False

    def __post_init__(self) -> None:
        """Refuse a case that cannot be made.

        Raises:
            ValueError: A size is off.
        """
        if self.blocks % self.blocks_per_chunk:
            raise ValueError(
                f"{self.blocks} blocks are no whole number of chunks of "
                f"{self.blocks_per_chunk}"
            )

    @property
    def geometry(self) -> Model:
        """The model."""
        return MODELS[self.model]

    @property
    def chunks(self) -> int:
        """Chunks of the call."""
        return self.blocks // self.blocks_per_chunk

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.block_size * self.blocks_per_chunk

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer, K and V together."""
        model = self.geometry
        tokens = model.planes * model.heads * self.block_size
        return tokens * model.head_size * ITEM_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes that one thread moves in one call."""
        return self.block_bytes * self.geometry.layers * self.blocks

    @property
    def pool_blocks(self) -> int:
        """Blocks of the paged cache: one more than are moved, which stays as it is.

        It also keeps K and V apart in the K/V-first layout.
        """
        return self.blocks * self.threads + 1

    def block_ids(self, thread: int) -> list[int]:
        """Return the ids that a thread moves, in token order."""
        first = thread * self.blocks
        ids = list(range(first, first + self.blocks))
        return ids if self.adjacent else ids[::-1]

    @property
    def footprint(self) -> int:
        """Bytes of memory that measuring it takes, device and host together."""
        moved = self.bytes * self.threads
        pools = len(self.geometry.layouts) * moved * self.pool_blocks
        # Chunks, their expected bytes, the floor's two sides, stock's staging and
        # what the generic operations allocate.
        return pools // (self.blocks * self.threads) + 6 * moved

    def __str__(self) -> str:
        ids = " adjacent" if self.adjacent else ""
        threads = f" {self.threads} threads" if self.threads > 1 else ""
        return (
            f"{self.model} {self.blocks}x{self.block_size}/{self.chunk_tokens} "
            f"{self.dtype}{ids}{threads}"
        )


@dataclass
class Row:
    """What was measured of one case in one layout and direction.

    Attributes:
        case: The case.
        layout: Layout of the paged cache.
        direction: ``gather`` or ``scatter``.
        seconds: Median time of a call by contender; stock's is that of K/V-first,
            since it refuses blocks-first.
        counts: Copies of one call by contender; empty where they can't be counted.
        failures: Why a contender could not be measured.
        seconds_of_all: The same of all calls; ``seconds`` may be of some.
        calls: How many calls ``seconds`` is of, and how many there were, by contender.
        far: Share of calls with CPUs far from each other; see ``_handover``.
    """

    case: Case
    layout: str
    direction: str
    seconds: dict[str, float]
    counts: dict[str, Copies]
    failures: dict[str, str]
    seconds_of_all: dict[str, float] = field(default_factory=dict)
    calls: dict[str, tuple[int, int]] = field(default_factory=dict)
    far: float = 0.0

    def ratio(self, contender: str, base: str) -> float | None:
        """Return how many times as long a contender takes as another."""
        if contender not in self.seconds or base not in self.seconds:
            return None
        return self.seconds[contender] / self.seconds[base]

    @property
    def all_count(self) -> bool:
        """Whether no call was left out."""
        return all(kept == made for kept, made in self.calls.values())

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        moved = self.case.bytes * self.case.threads
        return {
            **asdict(self),
            "bytes": moved,
            "gb_per_s": {
                name: moved / seconds / 1e9 for name, seconds in self.seconds.items()
            },
        }


@dataclass(frozen=True)
class Copies:
    """Copies of one call.

    Attributes:
        submissions: Copy operations submitted to the runtime.
        host_descriptors: Contiguous pieces copied between host and device.
        device_descriptors: Contiguous pieces copied inside the device.
        modelled_s: Time of the copies on the hardware's links, in seconds.
    """

    submissions: int
    host_descriptors: int
    device_descriptors: int
    modelled_s: float


def selection() -> list[Case]:
    """Return the cases that `make bench` measures: some for every target."""
    return [
        Case("Qwen3-1.7B", 128, 1, 1),
        Case("Qwen3-1.7B", 1024, 1, 1),
        Case("Qwen3-1.7B", 256, 4, 4),
        Case("Qwen3-1.7B", 128, 16, 4, dtype="fp8"),
        Case("Qwen3-1.7B", 128, 4, 4, adjacent=True),
        Case("Qwen3-1.7B", 256, 2, 1, threads=4),
        Case("Llama-3.1-8B", 256, 2, 2),
        Case("Llama-3.1-70B TP8", 256, 4, 4),
        Case("LLaMA-65B", 128, 1, 1),
        Case("GPT-NeoX-20B", 128, 1, 1),
        Case("DeepSeek-V3", 128, 1, 1),
        Case("DeepSeek-V3", 256, 4, 4),
        Case("DeepSeek-V3", 1024, 2, 2, dtype="fp8"),
        Case("DeepSeek-V3", 128, 4, 4, adjacent=True),
    ]


def matrix() -> Iterator[Case]:
    """Yield every combination that the full benchmark measures."""
    for model, block_size, blocks, dtype, threads in itertools.product(
        MODELS, (128, 256, 1024), (1, 2, 4, 16), ITEM_BYTES, (1, 4)
    ):
        yield Case(model, block_size, blocks, min(blocks, 4), dtype, threads)
