# SPDX-License-Identifier: Apache-2.0
"""Two NPUs serve one model, each worker with its part of the KV cache in LMCache."""

# Standard
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
import json
import os
import sys

# Third Party
import pytest
import torch

# First Party
from tests.e2e.clear_prompts import clear_prompts
from tests.e2e.kv_blocks import assert_same_blocks, blocks_of, read_transfers
from tests.e2e.serving import serving_environment
from tests.e2e.stack import BLOCK_SIZE, ENGINE_SIDE, MAX_MODEL_LEN
from tests.support.serving import tiny_models
from tests.support.serving.processes import ServerProcess
from tests.support.serving.runtime import Runtime, own_machine
from tests.support.serving.servers import (
    CONNECTOR,
    HOST,
    CacheServer,
    CacheServerConfig,
)

pytestmark = pytest.mark.sim

NPUS = 2
NEW_TOKENS = 4
PROMPTS = 3
# Two whole chunks and a rest, and exactly two chunks.
LENGTHS = (2 * BLOCK_SIZE + 40, 2 * BLOCK_SIZE)

# One process for all engines, so that vLLM is imported once: engines and workers are
# forked from it. A job with a connector waits for its go before the second round.
ENGINES = """
import gc, json, os, sys, time
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    for name, job in json.load(open(sys.argv[1])).items():
        os.environ.update(job["env"])
        llm = LLM(**job["engine"])
        greedy = SamplingParams(
            temperature=0, max_tokens=job["new_tokens"], ignore_eos=True
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        for round in job["rounds"]:
            while round == "warm" and not os.path.exists(f"{name}.go"):
                time.sleep(0.1)
            answers = [
                (list(output.outputs[0].token_ids), output.num_cached_tokens)
                for output in llm.generate(prompts, greedy, use_tqdm=False)
            ]
            json.dump(answers, open(f"{name}.part", "w"))
            os.rename(f"{name}.part", f"{name}.{round}")
        del llm
        gc.collect()
"""


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
class Answers:
    """Greedy answers to the prompts, with how many prompt tokens were restored."""

    tokens: list[list[int]]
    cached: list[int]


class Engines:
    """For each case an engine on one NPU, then one on two with an LMCache server.

    Args:
        runtime: The simulator.
        folder: For models, logs and what the probes write down.
    """

    def __init__(self, runtime: Runtime, folder: Path) -> None:
        self.folder = folder
        environment = serving_environment(runtime, folder / "cache")
        environment |= own_machine(folder, NPUS)
        environment["OMP_NUM_THREADS"] = "1"  # two workers, and few cores
        self.cache = CacheServer(
            CacheServerConfig(
                chunk_size=BLOCK_SIZE,
                shm_name=f"rbln_e2e_{os.getpid()}_tensor_parallel",
                l1_size_gb=0.25,
            ),
            environment,
            folder,
        )
        self.prompts: dict[str, list[list[int]]] = {}
        path = f"{ENGINE_SIDE}:{environment.get('PYTHONPATH', '')}".rstrip(":")
        self.process = ServerProcess(
            "vLLM",
            [sys.executable, "engines.py", "jobs.json"],
            environment | {"PYTHONPATH": path},
            folder / "engines.log",
            folder,
        )

    def write_jobs(self) -> None:
        """Make the models, choose the prompts and write down what to run."""
        jobs: dict[str, Any] = {}
        for case in CASES:
            folder = self.folder / case.dtype
            model = tiny_models.make(case.kind, folder, dtype=case.dtype)
            clear = clear_prompts(model, LENGTHS, PROMPTS, NEW_TOKENS)
            self.prompts[case.name] = [prompt.tokens for prompt in clear]
            jobs |= self._jobs(case, model)
        (self.folder / "engines.py").write_text(ENGINES)
        (self.folder / "jobs.json").write_text(json.dumps(jobs))

    def _jobs(self, case: Case, model: Path) -> dict[str, Any]:
        engine = {
            "model": str(model),
            "model_impl": "vllm",
            "block_size": BLOCK_SIZE,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_batched_tokens": BLOCK_SIZE,
            "max_num_seqs": 4,
            "num_gpu_blocks_override": 14,
            "enable_prefix_caching": False,
        }
        connector = {
            "kv_connector": CONNECTOR,
            "kv_role": "kv_both",
            "kv_connector_module_path": "rank_probe_connector",
            "kv_connector_extra_config": {
                "lmcache.mp.host": f"tcp://{HOST}",
                "lmcache.mp.port": self.cache.port,
                # An engine that compiles beside other tests answers late, and would
                # go on without LMCache. A third of the server's own patience.
                "lmcache.mp.heartbeat_interval": 40.0,
            },
        }
        common = {"prompts": self.prompts[case.name], "new_tokens": NEW_TOKENS}
        probe = self.folder / case.name
        probe.mkdir()
        return {
            f"{case.name}-one": {
                **common,
                "engine": engine,
                "rounds": ["cold"],
                "env": {},
            },
            f"{case.name}-two": {
                **common,
                "engine": {
                    **engine,
                    "tensor_parallel_size": NPUS,
                    "kv_transfer_config": connector,
                },
                "rounds": ["cold", "warm"],
                "env": {
                    "KV_PROBE_FOLDER": str(probe),
                    "KV_PROBE_BLOCK_AXIS": "0",
                    "RBLN_SIM_OPEN_LOG": str(probe / "npu-opens.jsonl"),
                },
            },
        }

    def answers(self, job: str, round_name: str) -> Answers:
        """Wait for the answers of one round of a job."""
        path = self.folder / f"{job}.{round_name}"
        if not path.exists():
            self.process.wait_ready(path.exists, 1200.0)
        answers = json.loads(path.read_text())
        return Answers([tokens for tokens, _ in answers], [n for _, n in answers])

    def go(self, job: str) -> None:
        """Let a job go on to its second round."""
        (self.folder / f"{job}.go").touch()


@pytest.fixture(scope="module")
def engines(
    runtime: Runtime, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    """The engines, running one after the other."""
    made = Engines(runtime, tmp_path_factory.mktemp("tensor-parallel"))
    made.cache.start()
    try:
        # The server gets ready while the prompts are chosen.
        made.write_jobs()
        made.cache.wait_ready()
        made.process.start()
        yield made
    finally:
        try:
            made.process.stop()
        finally:
            made.cache.stop()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_npus_answer_as_one_and_restore_exactly(
    case: Case, engines: Engines
) -> None:
    prompts = engines.prompts[case.name]
    chunks = sum(len(prompt) // BLOCK_SIZE for prompt in prompts)
    job = f"{case.name}-two"
    held = engines.cache.memory()["total_object_count"]

    one = engines.answers(f"{case.name}-one", "cold")
    cold = engines.answers(job, "cold")
    try:
        engines.cache.wait_stored(held + chunks * case.shards)
    finally:
        engines.go(job)
    warm = engines.answers(job, "warm")

    assert cold.tokens == one.tokens
    assert warm.tokens == one.tokens
    assert one.cached == cold.cached == [0] * PROMPTS
    # vLLM computes the last token of a prompt itself, even if all are restored.
    assert warm.cached == [min(2 * BLOCK_SIZE, len(prompt) - 1) for prompt in prompts]
    check_opens(engines, engines.folder / case.name / "npu-opens.jsonl")
    check_blocks(case, engines.folder / case.name, prompts)


def check_opens(engines: Engines, log: Path) -> None:
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
