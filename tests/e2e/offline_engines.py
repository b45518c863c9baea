# SPDX-License-Identifier: Apache-2.0
"""Engines of offline inference on two NPUs, one after the other, and their server.

One process makes all of them, so that vLLM is imported once.
"""

# Standard
from dataclasses import dataclass
from pathlib import Path
from typing import Any
import json
import os
import sys

# First Party
from tests.e2e.serving import serving_environment
from tests.e2e.stack import BLOCK_SIZE, ENGINE_SIDE, MAX_MODEL_LEN
from tests.support.serving.processes import ServerProcess
from tests.support.serving.runtime import Runtime, own_machine
from tests.support.serving.servers import (
    CONNECTOR,
    HOST,
    CacheServer,
    CacheServerConfig,
)

NPUS = 2

# Engines and workers are forked from this. A round "warm" waits for its go.
_PROGRAM = """
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
            outputs = llm.generate(prompts, greedy, use_tqdm=False)
            answers = {
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
                "counters": {
                    metric.name: metric.value
                    for metric in llm.get_metrics()
                    if hasattr(metric, "value")
                },
            }
            json.dump(answers, open(f"{name}.part", "w"))
            os.rename(f"{name}.part", f"{name}.{round}")
        del llm
        gc.collect()
"""


@dataclass(frozen=True)
class Answers:
    """Greedy answers to the prompts of one round.

    Attributes:
        tokens: The answers.
        cached: How many tokens of each prompt were restored.
        counters: vLLM's counters since the engine's start.
    """

    tokens: list[list[int]]
    cached: list[int]
    counters: dict[str, float]


class OfflineEngines:
    """A program that runs jobs, an engine each, and the server that they share.

    Args:
        runtime: The simulator.
        folder: For logs and what the probes write down.
    """

    def __init__(self, runtime: Runtime, folder: Path) -> None:
        self.folder = folder
        environment = serving_environment(runtime, folder / "cache")
        environment |= own_machine(folder, NPUS)
        environment["OMP_NUM_THREADS"] = "1"  # two workers, and few cores
        self.cache = CacheServer(
            CacheServerConfig(
                chunk_size=BLOCK_SIZE,
                shm_name=f"rbln_e2e_{os.getpid()}_{folder.name}",
                l1_size_gb=0.25,
            ),
            environment,
            folder,
        )
        path = f"{ENGINE_SIDE}:{environment.get('PYTHONPATH', '')}".rstrip(":")
        self.process = ServerProcess(
            "vLLM",
            [sys.executable, "engines.py", "jobs.json"],
            environment | {"PYTHONPATH": path},
            folder / "engines.log",
            folder,
        )
        self._jobs: dict[str, Any] = {}

    def connector(self, role: str = "kv_both") -> dict[str, Any]:
        """The configuration of LMCache's connector with a probe on each rank."""
        return {
            "kv_connector": CONNECTOR,
            "kv_role": role,
            "kv_connector_module_path": "rank_probe_connector",
            "kv_connector_extra_config": {
                "lmcache.mp.host": f"tcp://{HOST}",
                "lmcache.mp.port": self.cache.port,
                # An engine that compiles beside other tests answers late, and would
                # go on without LMCache. A third of the server's own patience.
                "lmcache.mp.heartbeat_interval": 40.0,
            },
        }

    def add(
        self,
        name: str,
        model: Path,
        prompts: list[list[int]],
        new_tokens: int,
        rounds: tuple[str, ...] = ("cold", "warm"),
        **engine: Any,
    ) -> None:
        """Add a job.

        Args:
            name: Its name, and that of its folder.
            model: Folder of the model.
            prompts: What it answers in each round.
            new_tokens: Tokens of an answer.
            rounds: Names of the rounds.
            engine: More arguments of ``LLM``.
        """
        probe = self.probe(name)
        probe.mkdir()
        self._jobs[name] = {
            "prompts": prompts,
            "new_tokens": new_tokens,
            "rounds": rounds,
            "engine": {
                "model": str(model),
                "model_impl": "vllm",
                "block_size": BLOCK_SIZE,
                "max_model_len": MAX_MODEL_LEN,
                "max_num_batched_tokens": BLOCK_SIZE,
                "max_num_seqs": 4,
                "num_gpu_blocks_override": 14,
                "enable_prefix_caching": False,
                "disable_log_stats": False,
                **engine,
            },
            "env": {
                "KV_PROBE_FOLDER": str(probe),
                "KV_PROBE_BLOCK_AXIS": "0",
                "RBLN_SIM_OPEN_LOG": str(probe / "npu-opens.jsonl"),
            },
        }

    def probe(self, name: str) -> Path:
        """Where the probes of a job write."""
        return self.folder / name

    def start(self) -> None:
        """Start the program; the server runs already."""
        (self.folder / "engines.py").write_text(_PROGRAM)
        (self.folder / "jobs.json").write_text(json.dumps(self._jobs))
        self.process.start()

    def answers(self, name: str, round_name: str) -> Answers:
        """Wait for the answers of one round of a job."""
        path = self.folder / f"{name}.{round_name}"
        if not path.exists():
            self.process.wait_ready(path.exists, 1200.0)
        return Answers(**json.loads(path.read_text()))

    def go(self, name: str) -> None:
        """Let a job go on to its round ``warm``."""
        (self.folder / f"{name}.go").touch()

    def stop(self) -> None:
        """Stop the program and the server."""
        try:
            self.process.stop()
        finally:
            self.cache.stop()
