# SPDX-License-Identifier: Apache-2.0
"""Time to first token, computed and restored, through `vllm serve`."""

# Standard
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
import os
import random
import statistics

# First Party
from tests.support.serving import tiny_models
from tests.support.serving.runtime import Runtime, own_machine, serving_environment
from tests.support.serving.servers import (
    CacheServer,
    CacheServerConfig,
    Engine,
    EngineConfig,
    serving,
)

#: Tokens per block and per chunk.
BLOCK_SIZE = 256
_BATCHED_TOKENS = 256


@dataclass(frozen=True)
class FirstToken:
    """Medians of one prompt length.

    Attributes:
        tokens: Length of the prompts.
        restored_tokens: Tokens of each that were restored and not computed.
        cold_ms: Time to first token, computed.
        warm_ms: Time to first token, restored.
    """

    tokens: int
    restored_tokens: int
    cold_ms: float
    warm_ms: float


def break_even(points: Sequence[FirstToken]) -> int | None:
    """Return the measured length from which on restoring is always faster.

    Args:
        points: One per length.

    Returns:
        The prompt length, or None if the longest is still computed faster.
    """
    found = None
    for point in sorted(points, key=lambda point: point.tokens, reverse=True):
        if point.warm_ms >= point.cold_ms:
            break
        found = point.tokens
    return found


def measure(
    runtime: Runtime, lengths: Sequence[int], prompts: int, folder: Path
) -> list[FirstToken]:
    """Send prompts of several lengths twice each, one at a time.

    Args:
        runtime: The NPU.
        lengths: Lengths of the prompts, in tokens; each longer than a chunk.
        prompts: Prompts of each length.
        folder: For the model, logs and the state of the simulated machine.

    Returns:
        Medians by length.

    Raises:
        RuntimeError: A warm answer differs from the cold one, or nothing was restored.
        ServerFailedError: A server failed.
    """
    longest = -(-(max(lengths) + 2) // BLOCK_SIZE) * BLOCK_SIZE
    size = tiny_models.Size(max_positions=max(4096, longest))
    model = tiny_models.make("qwen3", folder / "models", size)
    environment = serving_environment(runtime, folder / "cache") | own_machine(folder)
    cache = CacheServer(
        CacheServerConfig(
            chunk_size=BLOCK_SIZE, shm_name=f"rbln_bench_{os.getpid()}", l1_size_gb=1.0
        ),
        environment,
        folder / "logs",
        name="lmcache-server-ttft",
    )
    engine = Engine(
        EngineConfig(
            model=model,
            block_size=BLOCK_SIZE,
            max_model_len=longest,
            max_seqs=1,
            num_blocks=2 * longest // BLOCK_SIZE,
            max_batched_tokens=_BATCHED_TOKENS,
        ),
        cache.port,
        environment,
        folder / "logs",
    )
    with serving(cache, engine):
        return [_length(cache, engine, n, prompts) for n in lengths]


def _length(
    cache: CacheServer, engine: Engine, length: int, prompts: int
) -> FirstToken:
    chance = random.Random(length)
    cold, warm, restored = [], [], []
    chunks = (length - 1) // BLOCK_SIZE
    # The first pays for what happens once per length.
    for number in range(prompts + 1):
        prompt = [chance.randrange(3, tiny_models.VOCAB_SIZE) for _ in range(length)]
        computed = engine.complete([prompt], 1)[0]
        cache.wait_stored(length // BLOCK_SIZE)
        again = engine.complete([prompt], 1)[0]
        if again.token_ids != computed.token_ids:
            raise RuntimeError(
                f"a restored prompt of {length} tokens answers otherwise"
            )
        if again.cached_tokens < chunks * BLOCK_SIZE:
            raise RuntimeError(
                f"restored {again.cached_tokens} of {chunks * BLOCK_SIZE} tokens"
            )
        cache.wait_stored(length // BLOCK_SIZE)
        cache.clear()
        if number:
            cold.append(computed.ttft_s)
            warm.append(again.ttft_s)
            restored.append(again.cached_tokens)
    return FirstToken(
        tokens=length,
        restored_tokens=min(restored),
        cold_ms=statistics.median(cold) * 1e3,
        warm_ms=statistics.median(warm) * 1e3,
    )
