# SPDX-License-Identifier: Apache-2.0
"""vLLM engines with LMCache in process, started once, one at a time."""

# Standard
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
import json
import random

# First Party
from tests.e2e.serving import serving_environment
from tests.e2e.stack import ENGINE_SIDE, HITS, wait_until
from tests.support.documents import EXTENSION_PAGE, launch
from tests.support.serving import tiny_models
from tests.support.serving.client import (
    Completion,
    Counters,
    RequestFailedError,
    post_json,
)
from tests.support.serving.runtime import Runtime, own_machine
from tests.support.serving.servers import HOST, Engine, EngineConfig

CONNECTOR = "RBLNLMCacheConnectorV1"
#: As vLLM's users are told to set LMCache up, with a CPU tier.
DOCUMENTED_ENV = launch(EXTENSION_PAGE).env


@dataclass(frozen=True)
class InProcessConfig:
    """What distinguishes one engine from another.

    Attributes:
        name: Name of its folder.
        block_size: Tokens per KV block.
        chunk_size: Tokens per chunk.
        max_model_len: Longest prompt and answer together, in tokens.
        num_blocks: KV blocks on the NPU; ``None`` sizes it from the memory.
        model: Name of the tiny model.
        npus: Simulated NPUs.
        prefix_caching: Whether vLLM keeps prefixes on the NPU too.
        probe: Whether the engine is watched, see ``inprocess_probe.py``.
        inside_multi: Whether the connector is inside of vLLM's ``MultiConnector``,
            where it can't set what becomes of a request whose load failed.
        env: More environment.
        args: More arguments of ``vllm serve``.
    """

    name: str
    block_size: int = 128
    chunk_size: int = 256
    max_model_len: int = 1024
    num_blocks: int | None = 14
    model: str = "qwen3"
    npus: int = 1
    prefix_caching: bool = False
    probe: bool = False
    inside_multi: bool = False
    env: dict[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()


CONFIGS = {
    # The launch of the vendor's manual, letter by letter; the manual's model is large.
    "documented": InProcessConfig(
        "documented",
        block_size=1024,
        chunk_size=1024,
        max_model_len=8192,
        num_blocks=None,
        prefix_caching=True,
        # POST /reset_prefix_cache, which evicts the NPU's KV cache.
        env={"VLLM_SERVER_DEV_MODE": "1"},
    ),
    # Few blocks and a CPU tier of nine chunks; copies run when something waits for
    # them, their destination poisoned until then.
    "small": InProcessConfig(
        "small",
        probe=True,
        env={"LMCACHE_MAX_LOCAL_CPU_SIZE": "0.0023", "RBLN_SIM_DEFERRED": "latest"},
    ),
    # The custom kernel's KV layout, on two NPUs.
    "two-npus": InProcessConfig(
        "two-npus",
        npus=2,
        env={"RBLN_USE_CUSTOM_KERNEL": "1"},
        args=("--tensor-parallel-size", "2"),
    ),
    # MLA; chunks of any length; prefixes on the NPU too; no warm-up; another seed; a
    # connector inside of another one.
    "partial": InProcessConfig(
        "partial",
        model="mla",
        prefix_caching=True,
        probe=True,
        inside_multi=True,
        env={
            "LMCACHE_SAVE_UNFULL_CHUNK": "True",
            "VLLM_RBLN_ENABLE_WARM_UP": "0",
            "PYTHONHASHSEED": "7",
        },
        args=("--max-num-batched-tokens", "64"),
    ),
}


class InProcessEngine:
    """One ``vllm serve`` with LMCache in its processes.

    Args:
        config: What to run.
        runtime: NPU or simulator.
        folder: Log, model, what the probe writes down.
        env: More environment, over that of the configuration.
        connector_config: Entries for ``kv_connector_extra_config``.
    """

    def __init__(
        self,
        config: InProcessConfig,
        runtime: Runtime,
        folder: Path,
        env: dict[str, str] | None = None,
        connector_config: dict[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.probe_folder = folder / "probe"
        self.probe_folder.mkdir(parents=True)
        environment = serving_environment(runtime, folder / "cache", None)
        environment |= own_machine(folder, config.npus)
        environment |= DOCUMENTED_ENV
        environment |= {
            "LMCACHE_CHUNK_SIZE": str(config.chunk_size),
            "OMP_NUM_THREADS": "1",
            "PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics"),
            "INPROCESS_PROBE_FOLDER": str(self.probe_folder),
            "PYTHONPATH": f"{ENGINE_SIDE}:{environment.get('PYTHONPATH', '')}".rstrip(
                ":"
            ),
        }
        environment |= config.env
        environment |= env or {}
        self.env = environment
        (folder / "metrics").mkdir()
        size = tiny_models.Size(max_positions=max(4096, config.max_model_len))
        self.engine = Engine(
            EngineConfig(
                model=tiny_models.make(config.model, folder / "models", size),
                block_size=config.block_size,
                max_model_len=config.max_model_len,
                max_seqs=4,
                num_blocks=config.num_blocks,
                max_batched_tokens=128,
                connector=CONNECTOR,
                connector_module="inprocess_probe" if config.probe else None,
                connector_config=connector_config or {},
                prefix_caching=config.prefix_caching,
                load_failure_policy="recompute" if config.inside_multi else None,
                inside_multi=config.inside_multi,
                extra_args=config.args,
            ),
            None,
            environment,
            folder,
        )

    def start(self) -> None:
        """Start it and wait until it serves."""
        self.engine.start()
        self.engine.wait_ready()

    def stop(self) -> None:
        """Stop it; one that stops badly fails the test session."""
        self.engine.stop()

    def log(self) -> str:
        """Its log so far."""
        return self.engine.process.log()

    def prompt(self, length: int, seed: object) -> list[int]:
        """Make a random prompt; another seed shares no block with it."""
        chance = random.Random(f"{self.config.name} {seed!r}")
        return [chance.randrange(3, tiny_models.VOCAB_SIZE) for _ in range(length)]

    def ask(self, *prompts: list[int], new_tokens: int = 6) -> list[Completion]:
        """Answer prompts sent at the same time, and wait for their stores."""
        completions = self.engine.complete(list(prompts), new_tokens)
        self.engine.process.check_running()
        return completions

    def post(self, prompt: list[int], **body: Any) -> Any:
        """Send a request with more than a prompt in it; returns the answer's JSON."""
        whole = {
            "model": self.engine.served_name,
            "prompt": prompt,
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        url = f"http://{HOST}:{self.engine.port}/v1/completions"
        return post_json(url, whole | body, timeout_s=300)

    def counters(self) -> Counters:
        """Its Prometheus page."""
        return self.engine.counters()

    def count(self, name: str) -> int:
        """A counter; 0 where the page does not have it yet."""
        try:
            return int(self.counters().total(name))
        except RequestFailedError:
            return 0

    def hits(self) -> int:
        """Prompt tokens that vLLM got from LMCache since it started."""
        return int(self.counters().total(HITS))

    def state(self) -> dict[str, int]:
        """What the probe wrote down last."""
        path = self.probe_folder / "state.json"
        return dict(json.loads(path.read_text()))

    def order(self, what: str) -> None:
        """Give the probe an order, see ``inprocess_probe.py``."""
        (self.probe_folder / what).touch()

    def cancel(self, what: str) -> None:
        """Take an order back that the probe obeys until then."""
        (self.probe_folder / what).unlink()

    def check_obeyed(self, what: str) -> None:
        """Fail unless the probe has carried an order out."""
        assert not (self.probe_folder / what).exists(), f"nothing came to {what}"

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds."""
        wait_until(condition, what)


def check_nothing_is_held(engine: InProcessEngine) -> None:
    """Fail unless every lookup's pins and references are released."""
    # A step writes the state down; what an abort left is released by the next one.
    engine.ask(engine.prompt(20, "a step"), new_tokens=2)
    state = engine.state()
    assert {state[name] for name in ("pinned", "referenced", "lookups")} == {0}


class EnginePool:
    """Hands out running engines, one at a time."""

    def __init__(self, runtime: Runtime, folder: Path) -> None:
        self._runtime = runtime
        self._folder = folder
        self._current: InProcessEngine | None = None
        self._failed: dict[str, Exception] = {}

    def get(self, name: str) -> InProcessEngine:
        """Return the engine of this name, started if it does not run."""
        if name in self._failed:
            raise self._failed[name]
        if self._current is not None and self._current.config.name == name:
            return self._current
        self.stop()
        engine = InProcessEngine(CONFIGS[name], self._runtime, self._folder / name)
        self._current = engine
        try:
            engine.start()
        except Exception as error:
            # Not once more for every test.
            self._failed[name] = error
            self.stop()
            raise
        return engine

    def stop(self) -> None:
        """Stop the engine that runs, if any."""
        if self._current is not None:
            engine, self._current = self._current, None
            engine.stop()
