# SPDX-License-Identifier: Apache-2.0
"""An LMCache server and a vLLM engine on an NPU, as the end-to-end tests use them."""

# Standard
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
import json
import random
import time

# Third Party
import torch

# First Party
from tests.e2e.kv_blocks import Transfer, blocks_of, read_transfers
from tests.e2e.serving import serving_environment
from tests.support.serving import tiny_models
from tests.support.serving.client import Completion
from tests.support.serving.procfs import session_members
from tests.support.serving.runtime import Runtime, own_machine
from tests.support.serving.servers import (
    CacheServer,
    CacheServerConfig,
    Engine,
    EngineConfig,
)

TESTS = Path(__file__).parents[1]
ENGINE_SIDE = f"{TESTS / 'e2e' / 'engine_side'}:{TESTS / 'support'}"
HITS = "vllm:external_prefix_cache_hits_total"
LOCAL_HITS = "vllm:prefix_cache_hits_total"
# As the worker, and the scheduler's and the worker's heartbeats write in the log.
REGISTERED = "Worker engine-driven context registered"
LOST, FOUND = "entering degraded mode", "resuming normal operation"
HEARTBEATS = 2
BLOCK_SIZE = 128
MAX_MODEL_LEN = 1024


@dataclass(frozen=True)
class StackConfig:
    """What distinguishes one pair of servers from another.

    Attributes:
        name: Name of its folder.
        model: Name of the tiny model.
        size: Its dimensions.
        objects_per_chunk: What LMCache keeps of a chunk: more where there are groups.
        block_axis: Block axis of a layer's KV tensor.
        blocks_per_chunk: LMCache's chunk in blocks of 128 tokens.
        shm: Whether KV travels through shared memory, else by pickle.
        transfer_mode: Of the LMCache server.
        backend: ``LMCACHE_DEVICE_BACKEND`` of both; ``None`` lets LMCache detect.
        env: More environment of both.
        engine_args: More arguments of ``vllm serve``.
        num_blocks: KV blocks on the NPU; ``None`` sizes it from the memory.
        prefix_caching: As of ``EngineConfig``; ``None`` is how users start it.
        max_batched_tokens: Prompt tokens computed in one step. Less than a block makes
            vLLM-RBLN find parts of a block on the NPU too.
        load_failure_policy: As of ``EngineConfig``.
    """

    name: str
    model: str = "qwen3"
    size: tiny_models.Size = tiny_models.Size()
    objects_per_chunk: int = 1
    block_axis: int = 0
    blocks_per_chunk: int = 1
    shm: bool = True
    transfer_mode: str = "engine_driven"
    backend: str | None = "rbln"
    env: dict[str, str] = field(default_factory=dict)
    engine_args: tuple[str, ...] = ()
    num_blocks: int | None = 14
    prefix_caching: bool | None = None
    max_batched_tokens: int = BLOCK_SIZE
    load_failure_policy: str | None = "recompute"

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk."""
        return BLOCK_SIZE * self.blocks_per_chunk


class Stack:
    """A running pair of servers.

    Args:
        config: What to run.
        runtime: NPU or simulator.
        folder: Logs, model, what the probe writes down.
        shm_name: Name of the shared-memory segment, unique on this machine.
    """

    def __init__(
        self, config: StackConfig, runtime: Runtime, folder: Path, shm_name: str
    ) -> None:
        self.config = config
        self.folder = folder
        self.open_log = folder / "npu-opens.jsonl"
        self.probe_folder = folder / "probe"
        self.probe_folder.mkdir(parents=True)
        self._transfers: list[Transfer] = []
        env = serving_environment(runtime, folder / "cache", config.backend)
        env |= own_machine(folder)
        env |= config.env
        self._env = env
        self._cache_config = CacheServerConfig(
            chunk_size=config.chunk_size,
            transfer_mode=config.transfer_mode,
            shm_name=shm_name if config.shm else "",
            l1_size_gb=0.25,
        )
        self._caches: list[CacheServer] = []
        self.cache = self._new_cache(None)
        engine_env = env | {
            "PYTHONPATH": f"{ENGINE_SIDE}:{env.get('PYTHONPATH', '')}".rstrip(":"),
            "KV_PROBE_FOLDER": str(self.probe_folder),
            "KV_PROBE_BLOCK_AXIS": str(config.block_axis),
            # Lets a test forget what is on the NPU.
            "VLLM_SERVER_DEV_MODE": "1",
        }
        self.engine = Engine(
            EngineConfig(
                model=tiny_models.make(
                    config.model, folder.parent / "models", config.size
                ),
                block_size=BLOCK_SIZE,
                max_model_len=MAX_MODEL_LEN,
                max_seqs=4,
                num_blocks=config.num_blocks,
                max_batched_tokens=config.max_batched_tokens,
                connector_module="probe_connector",
                connector_config={"lmcache.mp.heartbeat_interval": 2.0},
                prefix_caching=config.prefix_caching,
                load_failure_policy=config.load_failure_policy,
                extra_args=config.engine_args,
            ),
            self.cache.port,
            engine_env,
            folder,
        )

    def start(self) -> None:
        """Start both servers at once and wait until they serve."""
        self.cache.start()
        self.engine.start()
        self.cache.wait_ready()
        self.engine.wait_ready()

    def stop(self) -> None:
        """Stop both servers; a server that stops badly fails the test session."""
        try:
            self.engine.stop()
        finally:
            self.cache.stop()

    def restart_cache(self, shm_name: str) -> None:
        """Replace the LMCache server by a new one, and wait for the engine.

        The engine must have sent a request before, which starts its heartbeats.

        Args:
            shm_name: Name of the new segment; empty sends KV by pickle.
        """
        registered, lost, found = map(self._said, (REGISTERED, LOST, FOUND))
        port = self.cache.port
        self.cache.stop()
        self._cache_config = replace(self._cache_config, shm_name=shm_name)
        self.cache = self._new_cache(port)
        # So that each of them says that it has found the new one.
        wait_until(
            lambda: self._said(LOST) >= lost + HEARTBEATS,
            "scheduler and worker notice that the LMCache server is gone",
        )
        self.cache.start()
        self.cache.wait_ready()
        wait_until(
            lambda: self._said(FOUND) >= found + HEARTBEATS,
            "scheduler and worker find the new LMCache server",
        )
        assert self._said(REGISTERED) > registered

    def _said(self, what: str) -> int:
        """How often the engine has logged something."""
        return self.engine.process.log().count(what)

    @property
    def cache_pids(self) -> set[int]:
        """Process ids of all LMCache servers so far, and of what runs below them."""
        leaders = {cache.process.pid for cache in self._caches}
        return leaders.union(*(session_members(pid) for pid in leaders))

    def _new_cache(self, port: int | None) -> CacheServer:
        cache = CacheServer(
            self._cache_config,
            self._env,
            self.folder,
            port,
            f"lmcache-server-{len(self._caches)}",
        )
        self._caches.append(cache)
        return cache

    def prompt(self, length: int, seed: object) -> list[int]:
        """Make a random prompt; another seed shares no block with it.

        Args:
            length: In tokens.
            seed: Anything with a distinct ``repr``.
        """
        chance = random.Random(f"{self.config.name} {seed!r}")
        return [chance.randrange(3, tiny_models.VOCAB_SIZE) for _ in range(length)]

    def forget_local(self) -> None:
        """Let the NPU forget every prefix, so that only LMCache has them."""
        if self.config.prefix_caching is not False:
            wait_until(self.engine.forget_prefixes, "vLLM resets its prefix cache")

    def cold(self, prompts: list[list[int]], max_tokens: int = 12) -> list[Completion]:
        """Send new prompts; wait until their chunks are stored and written down."""
        self.forget_local()
        held = self.cache.memory()["total_object_count"]
        hits = self.hits()
        known = len(self.transfers())
        completions = self.engine.complete(prompts, max_tokens)
        new = sum(len(prompt) // self.config.chunk_size for prompt in prompts)
        self.cache.wait_stored(held + new * self.config.objects_per_chunk)
        assert self.hits() == hits, "a cold prompt was found in LMCache"
        wait_until(
            lambda: (
                sum(
                    transfer.end - transfer.start
                    for transfer in self.transfers()[known:]
                    if transfer.direction == "STORE"
                )
                == new * self.config.chunk_size
            ),
            "the engine's probe writes down what was stored",
        )
        return completions

    def warm(self, prompts: list[list[int]], max_tokens: int = 12) -> list[Completion]:
        """Send prompts again, none of which is on the NPU, and see :meth:`ask`."""
        self.forget_local()
        return self.ask(prompts, max_tokens)

    def ask(
        self,
        prompts: list[list[int]],
        max_tokens: int = 12,
        new_chunks: int = 0,
        cache_salt: str | None = None,
    ) -> list[Completion]:
        """Send prompts and wait until their new chunks are stored and none is locked.

        Args:
            prompts: Prompts as token ids.
            max_tokens: Number of tokens to generate for each.
            new_chunks: How many of their chunks LMCache does not have yet.
            cache_salt: Of all these prompts.
        """
        held = self.cache.memory()["total_object_count"]
        completions = self.engine.complete(prompts, max_tokens, cache_salt)
        self.cache.wait_stored(held + new_chunks)
        return completions

    def hits(self) -> int:
        """Prompt tokens that vLLM got from LMCache since it started."""
        return int(self.engine.counters().total(HITS))

    def local_hits(self) -> int:
        """Prompt tokens that vLLM found on the NPU since it started."""
        return int(self.engine.counters().total(LOCAL_HITS))

    def fail_next_load(self) -> None:
        """Let the engine's next load fail when the KV is copied to the NPU."""
        (self.probe_folder / "fail-next-load").touch()

    @contextmanager
    def hold_next_load(self) -> Iterator[None]:
        """Hold the engine's next load, right before it writes, until the end."""
        order = self.probe_folder / "hold-next-load"
        order.touch()
        try:
            yield
        finally:
            order.unlink(missing_ok=True)
            (self.probe_folder / "load-held").unlink(missing_ok=True)

    def wait_held(self) -> None:
        """Wait until a load is held."""
        wait_until((self.probe_folder / "load-held").exists, "a load is held")

    def transfers(self) -> list[Transfer]:
        """Everything that the engine stored and restored so far."""
        self._transfers += read_transfers(self.probe_folder, len(self._transfers))
        return self._transfers

    def stored_blocks(self, prompt: list[int]) -> torch.Tensor:
        """Blocks of a prompt as they were computed before its latest store."""
        return blocks_of(self.transfers(), "STORE", prompt, BLOCK_SIZE)

    def restored_blocks(self, prompt: list[int]) -> torch.Tensor:
        """Blocks of a prompt as its latest load left them."""
        return blocks_of(self.transfers(), "RETRIEVE", prompt, BLOCK_SIZE)

    def opens(self) -> list[dict[str, object]]:
        """Which process opened which NPU, from the simulator's log."""
        if not self.open_log.exists():
            return []
        return [json.loads(line) for line in self.open_log.read_text().splitlines()]


def wait_until(
    condition: Callable[[], bool], what: str, timeout_s: float = 120.0
) -> None:
    """Wait for a condition.

    Args:
        condition: Returns whether it holds.
        what: Names it in the error.
        timeout_s: Longest wait in seconds.

    Raises:
        AssertionError: If it does not hold in time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(0.1)
