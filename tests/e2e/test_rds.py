# SPDX-License-Identifier: Apache-2.0
"""Direct storage end to end: vLLM with its KV cache on NVMe, without a CPU tier."""

# Standard
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
import json
import random
import sys

# Third Party
import pytest

# First Party
from examples.rbln_demo import client, tiny_models
from examples.rbln_demo.processes import ServerProcess
from examples.rbln_demo.runtime import Runtime, own_machine, serving_environment
from examples.rbln_demo.servers import HOST, free_port
from tests.e2e.stack import HITS, wait_until

pytestmark = pytest.mark.sim

CHUNK = 1024
# The environment of the user documentation, to the letter.
DOCUMENTED = {
    "PYTHONHASHSEED": "0",
    "LMCACHE_LOCAL_CPU": "False",
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "0",
    "LMCACHE_CHUNK_SIZE": "1024",
    "LMCACHE_USE_LAYERWISE": "False",
    "LMCACHE_STORAGE_PLUGINS": "RDSBackend",
    "LMCACHE_EXTRA_CONFIG": """{
    "storage_plugin.RDSBackend.module_path": "lmcache_rbln.storage_plugin.rds_backend",
    "storage_plugin.RDSBackend.class_name": "RDSBackend",
    "rds_buffer_size": 2048,
    "rds_failure_policy": "ignore"
}""",
}
TRANSFER = {"kv_connector": "RBLNLMCacheConnectorV1", "kv_role": "kv_both"}
FAILED = "RDS batched write failed for 1 keys"
WRITTEN = "lmcache:rds_written_chunks_total"
FAILURES = "lmcache:rds_write_failures_total"
REJECTED = "lmcache:rds_rejected_chunks_total"
# Nothing waits longer than this, neither for staging memory nor for the NVMe.
LONGEST_WAIT_S = 10.0


def extra_config(**changes: object) -> dict[str, str]:
    """The documented environment with other values in the extra config."""
    config = json.loads(DOCUMENTED["LMCACHE_EXTRA_CONFIG"]) | changes
    return {"LMCACHE_EXTRA_CONFIG": json.dumps(config)}


def prompt_of(seed: object, length: int) -> list[int]:
    """A random prompt; another seed shares no chunk with it."""
    chance = random.Random(repr(seed))
    return [chance.randrange(3, tiny_models.VOCAB_SIZE) for _ in range(length)]


@dataclass
class Server:
    """``vllm serve`` as the user documentation starts it.

    Attributes:
        folder: For logs, the NPUs' state and the NVMe.
        model: Folder of the model.
        env: Its environment.
        port: Where it answers.
    """

    folder: Path
    model: Path
    env: dict[str, str]
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        command = [
            str(Path(sys.executable).parent / "vllm"),
            "serve",
            str(self.model),
            *("--model-impl", "vllm"),
            *("--max-model-len", "8192"),
            *("--block-size", "1024"),
            # So that everything is restored from the NVMe.
            "--no-enable-prefix-caching",
            *("--max-num-batched-tokens", "128"),
            *("--max-num-seqs", "4"),
            *("--kv-transfer-config", json.dumps(TRANSFER)),
            *("--host", HOST, "--port", str(self.port)),
            *("--served-model-name", "m", "--enable-prompt-tokens-details"),
        ]
        self.process = ServerProcess(
            "vllm serve", command, self.env, self.folder / "vllm.log", self.folder
        )

    def wait_ready(self) -> None:
        """Wait until it serves."""
        self.process.wait_ready(
            lambda: client.answers(f"http://{HOST}:{self.port}/health"), 300.0
        )

    def ask(self, *prompts: list[int]) -> list[client.Completion]:
        """Answer prompts at the same time."""
        return client.complete_together(self.port, "m", list(prompts), 6)

    def total(self, counter: str) -> float:
        """Value of a counter on the Prometheus page; 0 if it is not there yet."""
        page = client.read_counters(f"http://{HOST}:{self.port}/metrics")
        try:
            return page.total(counter)
        except client.RequestFailedError:
            return 0.0

    def wait_for(self, counter: str, value: float) -> None:
        """Wait until a counter has a value."""
        wait_until(
            lambda: self.total(counter) >= value,
            f"{counter} reaches {value}",
            LONGEST_WAIT_S,
        )

    def store(self, *prompts: list[int]) -> list[client.Completion]:
        """Answer new prompts and wait until their chunks are down."""
        written = self.total(WRITTEN)
        answers = self.ask(*prompts)
        assert [answer.cached_tokens for answer in answers] == [0] * len(prompts)
        new = sum(len(prompt) // CHUNK for prompt in prompts)
        self.wait_for(WRITTEN, written + new)
        return answers


@pytest.fixture(scope="module")
def serve(
    runtime: Runtime, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """Starts a server with the documented environment; the one before is stopped."""
    running: list[Server] = []
    models = tmp_path_factory.mktemp("models")

    def stop() -> None:
        while running:
            running.pop().process.stop()

    def start(name: str, **env: str) -> Server:
        stop()
        folder = tmp_path_factory.mktemp(name)
        size = tiny_models.Size(max_positions=8192)
        server = Server(
            folder,
            tiny_models.make("qwen3", models, size=size),
            {
                **serving_environment(runtime, models / "cache", None),
                **own_machine(folder),
                "RBLN_SIM_MEMORY_GIB": "64",
                "PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics"),
                **DOCUMENTED,
                **env,
            },
        )
        (folder / "metrics").mkdir()
        running.append(server)
        server.process.start()
        server.wait_ready()
        return server

    yield start
    stop()


def test_the_documented_environment(serve: Callable[..., Server]) -> None:
    server = serve("documented")
    prompt = prompt_of("documented", 2 * CHUNK + 100)
    [cold] = server.store(prompt)
    hits = server.total(HITS)
    [warm] = server.ask(prompt)
    assert warm.token_ids == cold.token_ids
    assert warm.cached_tokens == 2 * CHUNK
    assert server.total(HITS) - hits == 2 * CHUNK
    log = server.process.log()
    assert "Stored 1024 out of total" in log
    assert "Retrieved 2048 out of 2048 required tokens" in log
    assert "RDS batched write failed" not in log
    assert "degraded mode" not in log


def test_twice_the_buffer_failures_and_damage(serve: Callable[..., Server]) -> None:
    # A chunk of the tiny model is 1 MiB: the staging memory holds three.
    server = serve(
        "small", **extra_config(rds_buffer_size=4), RBLN_SIM_RDS_FAULTS="eio:write:1"
    )
    prompts = [prompt_of(number, 2 * CHUNK + 50) for number in range(5)]

    # The first write fails: it is told and counted, and serving goes on.
    [first] = server.ask(prompts[0])
    server.wait_for(FAILURES, 1)
    assert FAILED in server.process.log()
    server.wait_for(WRITTEN, 1)
    cold = server.store(*prompts[1:])
    assert server.total(FAILURES) == 1

    # Ten chunks are more than twice the buffer.
    [again] = server.ask(prompts[0])
    assert again.token_ids == first.token_ids
    server.wait_for(WRITTEN, 10)
    hits = server.total(HITS)
    for prompt, answer in zip(prompts, [first, *cold], strict=True):
        [warm] = server.ask(prompt)
        assert warm.token_ids == answer.token_ids
        assert warm.cached_tokens == 2 * CHUNK
    assert server.total(HITS) - hits == 10 * CHUNK

    # Damaged chunks are recomputed, never used.
    nvme = Path(server.env["RBLN_SIM_STATE_DIR"]) / "rds.img"
    with nvme.open("r+b") as file:
        size = 10 * (CHUNK * 1024 + 4096)
        data = bytearray(file.read(size))
        for at in range(0, size, 10_000):
            data[at] ^= 1
        file.seek(0)
        file.write(data)
    for prompt, answer in zip(prompts[:2], [first, cold[0]], strict=True):
        [warm] = server.ask(prompt)
        assert warm.token_ids == answer.token_ids
    assert server.total(REJECTED) > 0
    server.process.check_running()


TWO_RANKS = """
import json, sys, time
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    job = json.load(open(sys.argv[1]))
    llm = LLM(**job["engine"])
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    for name in ("cold", "warm"):
        answers = [
            (list(output.outputs[0].token_ids), output.num_cached_tokens)
            for output in llm.generate(prompts, greedy, use_tqdm=False)
        ]
        json.dump(answers, open(f"{name}.part", "w"))
        time.sleep(2)  # what is stored after the answer
    import os
    os.rename("cold.part", "cold.json")
    os.rename("warm.part", "warm.json")
"""


def test_two_npus(runtime: Runtime, tmp_path: Path) -> None:
    prompts = [prompt_of(("two", number), 2 * CHUNK + 20) for number in range(2)]
    model = tiny_models.make(
        "qwen3", tmp_path / "models", size=tiny_models.Size(max_positions=8192)
    )
    job = {
        "prompts": prompts,
        "engine": {
            "model": str(model),
            "model_impl": "vllm",
            "block_size": CHUNK,
            "max_model_len": 8192,
            "max_num_batched_tokens": 128,
            "max_num_seqs": 4,
            "num_gpu_blocks_override": 12,
            "enable_prefix_caching": False,
            "tensor_parallel_size": 2,
            "kv_transfer_config": TRANSFER,
        },
    }
    (tmp_path / "engine.py").write_text(TWO_RANKS)
    (tmp_path / "job.json").write_text(json.dumps(job))
    process = ServerProcess(
        "vLLM",
        [sys.executable, "engine.py", "job.json"],
        {
            **serving_environment(runtime, tmp_path / "cache", None),
            **own_machine(tmp_path, 2),
            "OMP_NUM_THREADS": "1",
            **DOCUMENTED,
            **extra_config(rds_buffer_size=4),
        },
        tmp_path / "vllm.log",
        tmp_path,
    )
    process.start()
    try:
        process.wait_ready((tmp_path / "warm.json").exists, 240.0)
    finally:
        process.stop()
    cold = json.loads((tmp_path / "cold.json").read_text())
    warm = json.loads((tmp_path / "warm.json").read_text())
    assert [tokens for tokens, _ in warm] == [tokens for tokens, _ in cold]
    assert [cached for _, cached in cold] == [0, 0]
    assert [cached for _, cached in warm] == [2 * CHUNK] * 2
    log = process.log()
    # One per rank, with half of the heads each; writes do not overlap collectives.
    assert log.count("RDSBackend on rbln:0") == 2
    assert log.count("slots of 524288 bytes, synchronous writes") == 2
    assert "damaged" not in log
