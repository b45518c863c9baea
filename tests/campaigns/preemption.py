# SPDX-License-Identifier: Apache-2.0
"""Rounds of requests that outgrow the NPU's blocks, against each of them alone.

``python -m tests.campaigns.preemption --connector inprocess --rounds 200`` computes a
pool of prompts one by one without a connector, then sends four to eight of them at a
time, with a connector and few blocks, and compares every token. It exits with 1 at the
first difference, or if no request was preempted.
"""

# Future
from __future__ import annotations

# Standard
from pathlib import Path
from typing import Any
import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time

# First Party
from tests.support.serving import tiny_models
from tests.support.serving.runtime import find_runtime, own_machine, serving_environment
from tests.support.serving.servers import (
    CONNECTOR,
    CONNECTOR_MODULE,
    HOST,
    CacheServer,
    CacheServerConfig,
)

BLOCK = 32
CHUNK = 64
NUM_BLOCKS = 14
LONGEST = 256
# Lengths around chunks and blocks; answers that grow into the second block behind.
PROMPT_LENGTHS = (30, 32, 62, 64, 65, 75, 95, 96, 125, 128, 129)
ANSWER = 75


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connector", choices=("inprocess", "mp"), default="inprocess")
    parser.add_argument(
        "--processes",
        choices=("one", "several"),
        default="one",
        help="engine and worker in this process, or each in one of its own",
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--pool", type=int, default=16, help="different prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--async-scheduling", choices=("on", "off"), default="on")
    parser.add_argument("--folder", type=Path, help="keep logs and answers here")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def pool_of(options: argparse.Namespace) -> list[list[int]]:
    """The prompts; every third begins as the one before it."""
    chance = random.Random(options.seed)
    prompts: list[list[int]] = []
    for number in range(options.pool):
        length = PROMPT_LENGTHS[number % len(PROMPT_LENGTHS)]
        prompt = [chance.randrange(3, tiny_models.VOCAB_SIZE) for _ in range(length)]
        if number % 3 == 2:
            shared = min(length, len(prompts[-1])) // 2
            prompt[:shared] = prompts[-1][:shared]
        prompts.append(prompt)
    return prompts


def engine_of(options: argparse.Namespace, transfer: dict[str, Any] | None) -> Any:
    """Make an engine, with a connector if ``transfer`` says so."""
    # Third Party
    from vllm import LLM

    return LLM(
        model=str(tiny_models.make("qwen3", options.folder / "models")),
        model_impl="vllm",
        block_size=BLOCK,
        max_model_len=LONGEST,
        max_num_seqs=8 if transfer else 1,
        max_num_batched_tokens=BLOCK,
        num_gpu_blocks_override=NUM_BLOCKS,
        enable_prefix_caching=transfer is not None,
        async_scheduling=options.async_scheduling == "on",
        distributed_executor_backend="mp" if options.processes == "several" else "uni",
        kv_transfer_config=transfer,
        disable_log_stats=False,
    )


def generate(llm: Any, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    """Answer prompts together, greedily."""
    # Third Party
    from vllm import SamplingParams

    answers = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            for length in lengths
        ],
        use_tqdm=False,
    )
    return [list(answer.outputs[0].token_ids) for answer in answers]


def count(llm: Any, name: str) -> int:
    """Value of one of the engine's counters."""
    return int(sum(metric.value for metric in llm.get_metrics() if metric.name == name))


def write_reference(options: argparse.Namespace) -> None:
    """Answer each prompt alone, without a connector."""
    llm = engine_of(options, None)
    answers = [generate(llm, [prompt], [ANSWER])[0] for prompt in pool_of(options)]
    (options.folder / "reference.json").write_text(json.dumps(answers))


def run_rounds(options: argparse.Namespace) -> None:
    """Answer them together, again and again, and compare."""
    reference = json.loads((options.folder / "reference.json").read_text())
    prompts = pool_of(options)
    transfer: dict[str, Any] = {
        "kv_connector": "RBLNLMCacheConnectorV1",
        "kv_role": "kv_both",
    }
    if options.connector == "mp":
        transfer |= {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": CONNECTOR_MODULE,
            "kv_connector_extra_config": {
                "lmcache.mp.host": f"tcp://{HOST}",
                "lmcache.mp.port": options.port,
            },
        }
    llm = engine_of(options, transfer)
    chance = random.Random(options.seed + 1)
    start = time.monotonic()
    for number in range(1, options.rounds + 1):
        chosen = chance.sample(range(len(prompts)), chance.randint(4, 8))
        lengths = [chance.randint(20, ANSWER) for _ in chosen]
        answers = generate(llm, [prompts[i] for i in chosen], lengths)
        for i, length, answer in zip(chosen, lengths, answers, strict=True):
            want = reference[i][:length]
            if answer != want:
                at = next(k for k in range(length) if answer[k] != want[k])
                raise SystemExit(
                    f"round {number}: prompt {i} of {len(prompts[i])} tokens differs "
                    f"from token {at} of {length}: wanted {want[at]}, got {answer[at]}"
                )
        if number in (1, options.rounds) or number % 10 == 0:
            report(llm, number, time.monotonic() - start)
    if not count(llm, "vllm:num_preemptions"):
        raise SystemExit("no request was preempted")


def report(llm: Any, rounds: int, seconds: float) -> None:
    """Print how far it is."""
    found = {
        "rounds": rounds,
        "preemptions": count(llm, "vllm:num_preemptions"),
        "npu_hits": count(llm, "vllm:prefix_cache_hits"),
        "lmcache_hits": count(llm, "vllm:external_prefix_cache_hits"),
        "seconds": round(seconds),
    }
    print(json.dumps(found), flush=True)


def environment_of(options: argparse.Namespace) -> dict[str, str]:
    """Environment of both engines and the LMCache server."""
    environment = serving_environment(find_runtime(), options.folder / "cache", None)
    environment |= own_machine(options.folder)
    environment |= {
        "PYTHONHASHSEED": "0",
        "LMCACHE_LOCAL_CPU": "True",
        # Chunks are evicted now and then.
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.001",
        "LMCACHE_CHUNK_SIZE": str(CHUNK),
        "LMCACHE_USE_LAYERWISE": "False",
        "RBLN_SIM_DEFERRED": os.environ.get("RBLN_SIM_DEFERRED", "1"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(options.processes == "several")),
        "OMP_NUM_THREADS": "1",
    }
    if options.connector == "mp":
        environment["LMCACHE_DEVICE_BACKEND"] = "rbln"
    return environment


def drive(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run both parts, each in a process of its own; an NPU has one owner."""
    environment = environment_of(options)
    command = [sys.executable, "-m", "tests.campaigns.preemption", *arguments]
    command += ["--folder", str(options.folder)]
    subprocess.run([*command, "--role", "reference"], env=environment, check=True)
    rounds = [*command, "--role", "rounds"]
    if options.connector == "inprocess":
        return subprocess.run(rounds, env=environment).returncode
    server = CacheServer(
        CacheServerConfig(CHUNK, shm_name=f"campaign_{os.getpid()}", l1_size_gb=0.25),
        environment,
        options.folder,
    )
    server.start()
    try:
        server.wait_ready()
        rounds += ["--port", str(server.port)]
        status = subprocess.run(rounds, env=environment).returncode
        held = server.memory()
        locks = held["write_locked_count"] + held["read_locked_count"]
        if not status and locks:
            print(f"{locks} locks are left on the server")
            return 1
        return status
    finally:
        server.stop()


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.role == "reference":
        write_reference(options)
        return 0
    if options.role == "rounds":
        run_rounds(options)
        return 0
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        return drive(options, arguments)
    with tempfile.TemporaryDirectory(prefix="preemption-") as folder:
        options.folder = Path(folder)
        return drive(options, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
