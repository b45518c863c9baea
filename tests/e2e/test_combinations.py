# SPDX-License-Identifier: Apache-2.0
"""What ``LMCacheMPConnector`` works together with, shown by three engines.

The first has its layers on two NPUs, guesses tokens ahead, and has the connector as a
producer inside ``MultiConnector``. The second has its layers on two NPUs too, and is a
consumer of what the first stored. The third is one of two that serve side by side.
"""

# Standard
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError
import os

# Third Party
import pytest
import torch

# First Party
from tests.e2e.clear_prompts import ClearPrompt, clear_prompts
from tests.e2e.kv_blocks import assert_same_blocks, blocks_of, read_transfers
from tests.e2e.offline_engines import NPUS, OfflineEngines
from tests.e2e.serving import serving_environment
from tests.e2e.stack import BLOCK_SIZE, ENGINE_SIDE, MAX_MODEL_LEN
from tests.e2e.stack_pool import StackPool
from tests.support.serving import client, tiny_models
from tests.support.serving.runtime import Runtime, own_machine
from tests.support.serving.servers import (
    HOST,
    CacheServer,
    CacheServerConfig,
    Engine,
    EngineConfig,
)

pytestmark = pytest.mark.sim

NEW_TOKENS = 6
STORED = 3
# Two whole chunks and a rest, and exactly two chunks.
LENGTHS = (2 * BLOCK_SIZE + 40, 2 * BLOCK_SIZE)
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 2,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 2,
}


@dataclass(frozen=True)
class Served:
    """The engines, one after the other, and the prompts; the last one is new."""

    engines: OfflineEngines
    model: Path
    prompts: list[ClearPrompt]

    def wanted(self, count: int) -> list[list[int]]:
        """The answers of transformers to the first prompts."""
        return [list(prompt.answer) for prompt in self.prompts[:count]]

    def restored(self, count: int) -> list[int]:
        """Prompt tokens that can be restored; vLLM computes the last one itself."""
        lengths = [len(prompt.tokens) for prompt in self.prompts[:count]]
        return [min(2 * BLOCK_SIZE, length - 1) for length in lengths]

    def assert_same_bytes(self, reader: str) -> None:
        """What each rank of an engine restored is what the first engine computed."""
        for rank in range(NPUS):
            stored = read_transfers(self.engines.probe("producer") / f"rank{rank}")
            loaded = read_transfers(self.engines.probe(reader) / f"rank{rank}")
            for prompt in self.prompts[:STORED]:
                blocks = blocks_of(stored, "STORE", prompt.tokens, BLOCK_SIZE)
                again = blocks_of(loaded, "RETRIEVE", prompt.tokens, BLOCK_SIZE)
                assert_same_blocks(blocks, again)
                # [layers, blocks, ...]: each stage has its own layers.
                assert blocks.shape[0] == tiny_models.Size().layers // NPUS


@pytest.fixture(scope="module")
def served(
    runtime: Runtime, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    engines = OfflineEngines(runtime, tmp_path_factory.mktemp("combinations"))
    engines.cache.start()
    try:
        model = tiny_models.make("qwen3", engines.folder)
        prompts = clear_prompts(model, LENGTHS, STORED + 1, NEW_TOKENS)
        tokens = [prompt.tokens for prompt in prompts]
        engines.add(
            "producer",
            model,
            tokens[:STORED],
            NEW_TOKENS,
            pipeline_parallel_size=NPUS,
            speculative_config=DRAFTS,
            kv_transfer_config={
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "connectors": [engines.connector("kv_producer")]
                },
            },
        )
        engines.add(
            "consumer",
            model,
            tokens,
            NEW_TOKENS,
            ("cold",),
            pipeline_parallel_size=NPUS,
            kv_transfer_config=engines.connector("kv_consumer"),
        )
        engines.cache.wait_ready()
        engines.start()
        yield Served(engines, model, prompts)
    finally:
        engines.stop()


def test_stages_drafts_and_a_producer_inside_multi_connector(served: Served) -> None:
    engines = served.engines
    cold = engines.answers("producer", "cold")
    try:
        engines.cache.wait_stored(STORED * 2 * NPUS)
    finally:
        engines.go("producer")
    warm = engines.answers("producer", "warm")

    assert cold.tokens == warm.tokens == served.wanted(STORED)
    assert cold.cached == [0] * STORED
    assert warm.cached == served.restored(STORED)
    assert warm.counters["vllm:spec_decode_num_draft_tokens"] > 0
    served.assert_same_bytes("producer")


def test_a_consumer_restores_and_stores_nothing(served: Served) -> None:
    engines = served.engines
    answers = engines.answers("consumer", "cold")
    assert answers.tokens == served.wanted(STORED + 1)
    assert answers.cached == [*served.restored(STORED), 0]
    served.assert_same_bytes("consumer")
    # What it might still store, it would before it ends.
    assert engines.process.wait_ended(300.0) == 0
    engines.cache.wait_stored(STORED * 2 * NPUS)


class Replicas:
    """Two engines behind one port, as vLLM makes them by default, and a server."""

    def __init__(self, runtime: Runtime, folder: Path, model: Path) -> None:
        self.probe = folder / "probe"
        self.probe.mkdir()
        env = serving_environment(runtime, folder / "cache")
        env |= own_machine(folder, NPUS) | {"OMP_NUM_THREADS": "1"}
        server = CacheServerConfig(
            BLOCK_SIZE, shm_name=f"rbln_e2e_{os.getpid()}_replicas", l1_size_gb=0.25
        )
        self.cache = CacheServer(server, env, folder)
        config = EngineConfig(
            model=model,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_seqs=4,
            num_blocks=14,
            max_batched_tokens=BLOCK_SIZE,
            connector_module="rank_probe_connector",
            extra_args=("--data-parallel-size", str(NPUS), "--api-server-count", "1"),
        )
        path = f"{ENGINE_SIDE}:{env.get('PYTHONPATH', '')}".rstrip(":")
        probe = {"KV_PROBE_FOLDER": str(self.probe), "KV_PROBE_BLOCK_AXIS": "0"}
        env |= probe | {"PYTHONPATH": path}
        self.engine = Engine(config, self.cache.port, env, folder)

    def ask(self, rank: int, prompt: ClearPrompt) -> tuple[list[int], int]:
        """Let one engine answer; returns the answer and the tokens restored."""
        body = {
            "model": self.engine.served_name,
            "prompt": prompt.tokens,
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        url = f"http://{HOST}:{self.engine.port}/v1/completions"
        chosen = {"X-data-parallel-rank": str(rank)}
        answer = client.post_json(url, body, 300.0, chosen)
        details = answer["usage"]["prompt_tokens_details"] or {}
        return answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0

    def blocks(self, rank: int, direction: str, prompt: ClearPrompt) -> torch.Tensor:
        """What one engine last stored or restored of a prompt."""
        transfers = read_transfers(self.probe / f"rank{rank}")
        return blocks_of(transfers, direction, prompt.tokens, BLOCK_SIZE)


@pytest.fixture(scope="module")
def replicas(
    runtime: Runtime,
    served: Served,
    stacks: StackPool,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Replicas]:
    stacks.stop()  # for the memory of this machine
    made = Replicas(runtime, tmp_path_factory.mktemp("replicas"), served.model)
    try:
        made.cache.start()
        made.engine.start()
        made.cache.wait_ready()
        made.engine.wait_ready()
        yield made
    finally:
        try:
            made.engine.stop()
        finally:
            made.cache.stop()


def test_data_parallel_engines_share_what_is_stored(
    replicas: Replicas, served: Served
) -> None:
    [prompt, *_] = served.prompts
    answer = list(prompt.answer)
    assert replicas.ask(0, prompt) == (answer, 0)
    replicas.cache.wait_stored(2)
    for rank in range(NPUS):
        assert replicas.ask(rank, prompt) == (answer, *served.restored(1))
        assert_same_blocks(
            replicas.blocks(0, "STORE", prompt),
            replicas.blocks(rank, "RETRIEVE", prompt),
        )
    replicas.cache.wait_stored(2)


def test_a_load_that_fails_fails_its_request_alone(
    replicas: Replicas, served: Served
) -> None:
    """vLLM's default policy; the engine ended one step later."""
    [_, prompt, *_] = served.prompts
    held = replicas.cache.memory()["total_object_count"]
    wanted = replicas.ask(1, prompt)
    replicas.cache.wait_stored(held + 2)
    (replicas.probe / "rank1/fail-next-load").touch()
    with pytest.raises(HTTPError, match="500"):
        replicas.ask(1, prompt)
    answer, restored = replicas.ask(1, prompt)
    assert (answer, 0) == wanted
    assert [restored] == served.restored(2)[1:]
    replicas.cache.wait_stored(held + 2)
