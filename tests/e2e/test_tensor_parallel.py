# SPDX-License-Identifier: Apache-2.0
"""Two NPUs serve one model, each worker with its part of the KV cache in LMCache."""

# Standard
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
import json

# Third Party
import pytest
import torch

# First Party
from tests.e2e.clear_prompts import ClearPrompt, clear_prompts
from tests.e2e.kv_blocks import assert_same_blocks, blocks_of, read_transfers
from tests.e2e.offline_engines import NPUS, OfflineEngines
from tests.e2e.stack import BLOCK_SIZE
from tests.support.serving import tiny_models
from tests.support.serving.runtime import Runtime

pytestmark = pytest.mark.sim

NEW_TOKENS = 4
PROMPTS = 3
# Two whole chunks and a rest, and exactly two chunks.
LENGTHS = (2 * BLOCK_SIZE + 40, 2 * BLOCK_SIZE)


@dataclass(frozen=True)
class Case:
    """A model that is served.

    Attributes:
        kind: Of the tiny model.
        dtype: Of its weights and its KV cache.
    """

    kind: str
    dtype: str

    @property
    def name(self) -> str:
        """Name for folders and test ids."""
        return f"{self.kind}-{self.dtype}"

    @property
    def shards(self) -> int:
        """Objects that LMCache keeps of a chunk: the ranks share an MLA cache's."""
        return 1 if self.kind == "mla" else NPUS


CASES = [
    Case(kind, dtype) for kind in ("qwen3", "mla") for dtype in ("float16", "bfloat16")
]


@dataclass(frozen=True)
class Served:
    """The engines of all cases, running one after the other, and their prompts."""

    engines: OfflineEngines
    prompts: dict[str, list[ClearPrompt]]


@pytest.fixture(scope="module")
def served(
    runtime: Runtime, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    engines = OfflineEngines(runtime, tmp_path_factory.mktemp("tensor-parallel"))
    engines.cache.start()
    try:
        # The server gets ready while the prompts are chosen.
        prompts = {}
        for case in CASES:
            folder = engines.folder / case.dtype
            model = tiny_models.make(case.kind, folder, dtype=case.dtype)
            clear = clear_prompts(model, LENGTHS, PROMPTS, NEW_TOKENS)
            prompts[case.name] = clear
            engines.add(
                case.name,
                model,
                [prompt.tokens for prompt in clear],
                NEW_TOKENS,
                tensor_parallel_size=NPUS,
                kv_transfer_config=engines.connector(),
            )
        engines.cache.wait_ready()
        engines.start()
        yield Served(engines, prompts)
    finally:
        engines.stop()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_npus_answer_as_one_and_restore_exactly(case: Case, served: Served) -> None:
    """As transformers does, to be exact: no NPU, no vLLM, no cache."""
    engines = served.engines
    prompts = [prompt.tokens for prompt in served.prompts[case.name]]
    wanted = [list(prompt.answer) for prompt in served.prompts[case.name]]
    chunks = sum(len(prompt) // BLOCK_SIZE for prompt in prompts)
    held = engines.cache.memory()["total_object_count"]

    cold = engines.answers(case.name, "cold")
    try:
        engines.cache.wait_stored(held + chunks * case.shards)
    finally:
        engines.go(case.name)
    warm = engines.answers(case.name, "warm")

    assert cold.tokens == warm.tokens == wanted
    assert cold.cached == [0] * PROMPTS
    # vLLM computes the last token of a prompt itself, even if all are restored.
    assert warm.cached == [min(2 * BLOCK_SIZE, len(prompt) - 1) for prompt in prompts]
    check_opens(engines, engines.probe(case.name) / "npu-opens.jsonl")
    check_blocks(case, engines.probe(case.name), prompts)


def check_opens(engines: OfflineEngines, log: Path) -> None:
    """Each NPU was opened once, by a worker of its own."""
    opens = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(entry["npu"] for entry in opens) == list(range(NPUS))
    pids = {entry["pid"] for entry in opens}
    assert len(pids) == NPUS
    assert pids.isdisjoint({engines.process.pid, engines.cache.process.pid})


def check_blocks(case: Case, folder: Path, prompts: list[list[int]]) -> None:
    """On each rank, what was restored is what it had computed, byte by byte."""
    stored_by_rank = []
    for rank in range(NPUS):
        transfers = read_transfers(folder / f"rank{rank}")
        stored = []
        for prompt in prompts:
            blocks = blocks_of(transfers, "STORE", prompt, BLOCK_SIZE)
            again = blocks_of(transfers, "RETRIEVE", prompt, BLOCK_SIZE)
            assert_same_blocks(blocks, again)
            stored.append(blocks)
        stored_by_rank.append(torch.cat(stored, dim=1))
    first, second = stored_by_rank
    assert first.dtype == getattr(torch, case.dtype)
    if case.kind == "mla":
        assert_same_blocks(first, second)
    else:
        # [layers, blocks, 2, heads, 1, block size, head size]: the heads are split.
        assert first.shape[3] == second.shape[3] == tiny_models.Size().kv_heads // NPUS
        assert not torch.equal(first, second)
