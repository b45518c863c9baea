# SPDX-License-Identifier: Apache-2.0
"""What a request that decodes has of others' restores, through `vllm serve`."""

# Standard
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
import itertools
import os
import random
import statistics

# First Party
from benchmarks._ttft import BLOCK_SIZE
from tests.support.serving import tiny_models
from tests.support.serving.runtime import Runtime, own_machine, serving_environment
from tests.support.serving.servers import (
    CONNECTOR_MODULE,
    CacheServer,
    CacheServerConfig,
    Engine,
    EngineConfig,
    serving,
)

ROOT = Path(__file__).resolve().parents[1]
#: Little to compute, and much to restore: 32 KiB for each token.
_SIZE = tiny_models.Size(layers=8, heads=8, kv_heads=8, head_dim=128, hidden=64)
_TOKEN_BYTES = 2 * _SIZE.layers * _SIZE.kv_heads * _SIZE.head_dim * 2
_CONNECTORS = {
    "on the engine's thread": "benchmarks._waiting_connector",
    "beside the engine": CONNECTOR_MODULE,
}


@dataclass(frozen=True)
class Gaps:
    """Times between two tokens of a request that decodes.

    Attributes:
        restores: Where the others' restores ran; ``none`` where there were none.
        restored_bytes: Bytes of each.
        count: How many of them ended while it decoded.
        median_ms: Median.
        p95_ms: What 95 of 100 do not exceed.
        longest_ms: The longest.
    """

    restores: str
    restored_bytes: int
    count: int
    median_ms: float
    p95_ms: float
    longest_ms: float


def summary(
    restores: str, restored_bytes: int, count: int, times_s: tuple[float, ...]
) -> Gaps:
    """Summarise the times at which tokens came.

    Args:
        restores: See :class:`Gaps`; likewise the next two.
        restored_bytes: Bytes.
        count: Number.
        times_s: Seconds, one for each token, three at least.
    """
    gaps = [1e3 * (b - a) for a, b in itertools.pairwise(times_s)]
    return Gaps(
        restores,
        restored_bytes,
        count,
        statistics.median(gaps),
        statistics.quantiles(gaps, n=20, method="inclusive")[-1],
        max(gaps),
    )


def measure(runtime: Runtime, blocks: int, tokens: int, folder: Path) -> list[Gaps]:
    """Decode alone, and beside restores on the engine's thread and beside the engine.

    Args:
        runtime: The NPU.
        blocks: Blocks that each of the others restores.
        tokens: Tokens that are decoded.
        folder: For the model, logs and the state of the simulated machine.

    Returns:
        Without restores, then with each kind of them.

    Raises:
        RuntimeError: Something was not restored, or an answer differs from the first.
        ServerFailedError: A server failed.
    """
    model = tiny_models.make("qwen3", folder / "models", _SIZE)
    environment = serving_environment(runtime, folder / "cache") | own_machine(folder)
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    found: list[Gaps] = []
    answers = set()
    for kind, module in _CONNECTORS.items():
        cache = CacheServer(
            CacheServerConfig(
                chunk_size=BLOCK_SIZE, shm_name=f"rbln_bench_{os.getpid()}"
            ),
            environment,
            folder / "logs",
            name=f"lmcache-server-gaps-{len(found)}",
        )
        longest = (blocks + 1) * BLOCK_SIZE
        engine = Engine(
            EngineConfig(
                model=model,
                block_size=BLOCK_SIZE,
                max_model_len=longest,
                max_seqs=2,
                num_blocks=3 * longest // BLOCK_SIZE,
                connector_module=module,
            ),
            cache.port,
            environment,
            folder / "logs",
            name=f"vllm-serve-gaps-{len(found)}",
        )
        with serving(cache, engine):
            answer, gaps = _decode(cache, engine, kind, blocks, tokens)
        answers.add(answer)
        found += gaps if not found else gaps[1:]
    if len(answers) != 1:
        raise RuntimeError("beside other restores a prompt answers otherwise")
    return found


def _decode(
    cache: CacheServer, engine: Engine, kind: str, blocks: int, tokens: int
) -> tuple[tuple[int, ...], list[Gaps]]:
    chance = random.Random(0)
    length = blocks * BLOCK_SIZE + 1
    prompts = [
        [chance.randrange(3, tiny_models.VOCAB_SIZE) for _ in range(n)]
        for n in (length, length, BLOCK_SIZE // 2)
    ]
    *others, decoded = prompts
    engine.complete(others, 1)
    cache.wait_stored(blocks * len(others))
    alone = engine.complete([decoded], tokens)[0]
    count = 0
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(engine.complete, [decoded], tokens)
        while not beside.done():
            [other] = engine.complete([others[count % len(others)]], 1)
            if other.cached_tokens < blocks * BLOCK_SIZE:
                raise RuntimeError(
                    f"restored {other.cached_tokens} of {blocks * BLOCK_SIZE} tokens"
                )
            count += 1
        [answer] = beside.result()
    if answer.token_ids != alone.token_ids:
        raise RuntimeError("beside restores a prompt answers otherwise")
    size = blocks * BLOCK_SIZE * _TOKEN_BYTES
    return answer.token_ids, [
        summary("none", 0, 0, alone.times_s),
        summary(kind, size, count, answer.times_s),
    ]
