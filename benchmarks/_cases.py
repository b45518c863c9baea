# SPDX-License-Identifier: Apache-2.0
"""What the block transfer benchmark measures: models, cases and rows. Pure."""

# Standard
from collections.abc import Iterator
from dataclasses import dataclass, field
import itertools

MLA = "mla"
BLOCKS_FIRST = "blocks-first"
KV_FIRST = "K/V-first"
GATHER = "gather"
SCATTER = "scatter"
FLOOR = "floor"
STOCK = "stock"
GENERIC = "generic"
OURS = "ours"
ITEM_BYTES = {"bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class Model:
    """KV geometry of a model on one NPU; MLA has one latent row in place of K and V."""

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
        blocks: Blocks of the call, whole chunks.
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
    def bytes(self) -> int:
        """Bytes that one thread moves in one call."""
        model = self.geometry
        rows = model.layers * model.planes * model.heads * self.block_size * self.blocks
        return rows * model.head_size * ITEM_BYTES[self.dtype]

    @property
    def pool_blocks(self) -> int:
        """Blocks of the paged cache: one more than are moved, which stays as it is."""
        return self.blocks * self.threads + 1

    @property
    def footprint(self) -> int:
        """Bytes of memory that measuring it takes, device and host together."""
        pools = len(self.geometry.layouts) * self.bytes * self.pool_blocks
        # Chunks, their expected bytes, the floor's two sides, stock's staging and
        # what the generic operations allocate.
        return pools // self.blocks + 6 * self.bytes * self.threads

    def block_ids(self, thread: int) -> list[int]:
        """Return the ids that a thread moves, in token order."""
        ids = list(range(thread * self.blocks, (thread + 1) * self.blocks))
        return ids if self.adjacent else ids[::-1]

    def __str__(self) -> str:
        ids = " adjacent" if self.adjacent else ""
        threads = f" {self.threads} threads" if self.threads > 1 else ""
        return (
            f"{self.model} {self.blocks}x{self.block_size}/{self.chunk_tokens} "
            f"{self.dtype}{ids}{threads}"
        )


@dataclass(frozen=True)
class Copies:
    """Copies of one call: operations submitted to the runtime, their contiguous pieces
    between host and device, and seconds on the hardware's links."""

    submissions: int
    host_descriptors: int
    modelled_s: float


@dataclass
class Row:
    """What was measured of one case in one layout and direction.

    Attributes:
        case: The case.
        layout: Layout of the paged cache.
        direction: ``gather`` or ``scatter``.
        seconds: Time of a call by contender; stock's is that of K/V-first, since it
            refuses blocks-first.
        copies: Copies of one call by contender; empty where they can't be counted.
        hardware: Copies of ours where the simulator is as slow as the hardware.
    """

    case: Case
    layout: str
    direction: str
    seconds: dict[str, float] = field(default_factory=dict)
    copies: dict[str, Copies] = field(default_factory=dict)
    hardware: Copies | None = None

    def ratio(self, contender: str, base: str) -> float | None:
        """Return how many times as long a contender takes as another."""
        if contender not in self.seconds or base not in self.seconds:
            return None
        return self.seconds[contender] / self.seconds[base]

    def __str__(self) -> str:
        return f"{self.case} {self.layout} {self.direction}"


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
