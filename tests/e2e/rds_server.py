# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` with its KV cache on direct storage, as the documentation has it."""

# Standard
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
import functools
import json
import random
import re
import sys
import urllib.request

# First Party
from tests.e2e.clear_prompts import ClearPrompt, clear_prompts
from tests.e2e.serving import serving_environment
from tests.e2e.stack import wait_until
from tests.support.documents import RDS_PAGE, launch
from tests.support.serving import client, tiny_models
from tests.support.serving.processes import ServerProcess
from tests.support.serving.runtime import Runtime, own_machine
from tests.support.serving.servers import HOST, free_port

CHUNK = 1024
NEW_TOKENS = 2
# Of the documentation, to the letter.
DOCUMENTED = launch(RDS_PAGE).env
# The first one is the model, which is large.
ARGUMENTS = launch(RDS_PAGE).command("vllm", "serve")[1:]
WRITTEN = "lmcache:rds_written_chunks_total"
WRITE_FAILURES = "lmcache:rds_write_failures_total"
READ_FAILURES = "lmcache:rds_read_failures_total"
STAGING_FAILURES = "lmcache:rds_staging_failures_total"
REJECTED = "lmcache:rds_rejected_chunks_total"
_FAILED = re.compile(r"RDS batched write failed for (\d+) keys: (.*)")
# For what follows an answer; nothing is measured with it.
_PATIENCE_S = 60.0


def extra_config(**changes: object) -> dict[str, str]:
    """The documented environment with other values in the extra config."""
    config = json.loads(DOCUMENTED["LMCACHE_EXTRA_CONFIG"]) | changes
    return {"LMCACHE_EXTRA_CONFIG": json.dumps(config)}


def prompt_of(seed: object, length: int) -> list[int]:
    """A random prompt; another seed shares no chunk with it."""
    chance = random.Random(repr(seed))
    return [chance.randrange(3, tiny_models.VOCAB_SIZE) for _ in range(length)]


def model_in(folder: Path) -> Path:
    """The model of these tests, made in a folder that they share."""
    size = tiny_models.Size(max_positions=8192)
    return tiny_models.make("qwen3", folder, size=size)


@functools.cache
def uncached(folder: Path) -> Sequence[ClearPrompt]:
    """Prompts of a chunk and a rest, and what the model answers without a cache."""
    return clear_prompts(model_in(folder), (CHUNK + 20,), 3, NEW_TOKENS)


@dataclass
class Server:
    """``vllm serve`` as the user documentation starts it.

    Attributes:
        runtime: Where it runs.
        shared: Folder of the model and of compiled graphs.
        folder: For logs, the NPUs' state and the NVMe.
        changes: To the documented environment.
        npus: NPUs that serve the model together.
        prefix_caching: Whether vLLM keeps prefixes on the NPU too, as documented;
            without, everything is restored from the NVMe.
        port: Where it answers.
    """

    runtime: Runtime
    shared: Path
    folder: Path
    changes: dict[str, str] = field(default_factory=dict)
    npus: int = 1
    prefix_caching: bool = False
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        metrics = self.folder / "metrics"
        metrics.mkdir()
        self._faults = self.folder / "faults"
        self.set_faults("")
        command = [
            str(Path(sys.executable).parent / "vllm"),
            "serve",
            str(model_in(self.shared)),
            *ARGUMENTS,
            *(() if self.prefix_caching else ("--no-enable-prefix-caching",)),
            *("--tensor-parallel-size", str(self.npus)),
            *("--host", HOST, "--port", str(self.port)),
            *("--served-model-name", "m", "--enable-prompt-tokens-details"),
        ]
        self.env = {
            **serving_environment(self.runtime, self.shared / "cache", None),
            **own_machine(self.folder, self.npus),
            "RBLN_SIM_MEMORY_GIB": "64",
            "RBLN_SIM_RDS_FAULTS": f"@{self._faults}",
            "PROMETHEUS_MULTIPROC_DIR": str(metrics),
            # POST /reset_prefix_cache, which evicts the NPU's KV cache.
            "VLLM_SERVER_DEV_MODE": "1",
            **DOCUMENTED,
            **self.changes,
        }
        self.process = ServerProcess(
            "vllm serve", command, self.env, self.folder / "vllm.log", self.folder
        )

    @property
    def nvme(self) -> Path:
        """The file that is the NVMe."""
        return Path(self.env["RBLN_SIM_STATE_DIR"]) / "rds.img"

    def set_faults(self, rules: str) -> None:
        """Let the NVMe fail by these rules from now on; none: it is well again."""
        new = self._faults.with_suffix(".new")
        new.write_text(rules)
        new.replace(self._faults)

    def ask(self, *prompts: list[int]) -> list[client.Completion]:
        """Answer prompts at the same time."""
        return client.complete_together(self.port, "m", list(prompts), NEW_TOKENS)

    def evict_npu_cache(self) -> None:
        """Empty vLLM's own prefix cache."""
        request = urllib.request.Request(
            f"http://{HOST}:{self.port}/reset_prefix_cache", method="POST"
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.status == 200

    def total(self, counter: str) -> float:
        """Value of a counter on the Prometheus page; 0 if it is not there yet."""
        page = client.read_counters(f"http://{HOST}:{self.port}/metrics")
        try:
            return page.total(counter)
        except client.RequestFailedError:
            return 0.0

    def wait_for(self, counter: str, value: float) -> None:
        """Wait until a counter has a value, and not more."""
        wait_until(
            lambda: self.total(counter) >= value,
            f"{counter} reaches {value}",
            _PATIENCE_S,
        )
        assert self.total(counter) == value

    def store(self, *prompts: list[int]) -> list[client.Completion]:
        """Answer prompts that are not stored, and wait until their chunks are down."""
        written = self.total(WRITTEN)
        answers = self.ask(*prompts)
        assert [answer.cached_tokens for answer in answers] == [0] * len(prompts)
        new = sum(len(prompt) // CHUNK for prompt in prompts)
        self.wait_for(WRITTEN, written + new * self.npus)
        return answers

    def failed_writes(self) -> list[tuple[int, str]]:
        """Number of keys and reason of each failed write in the log."""
        return [(int(n), why) for n, why in _FAILED.findall(self.process.log())]


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """A server, started and ready; stopped at the end."""
    server.process.start()
    try:
        uncached(server.shared)  # while it starts
        server.process.wait_ready(
            lambda: client.answers(f"http://{HOST}:{server.port}/health"), 300.0
        )
        yield server
    finally:
        server.process.stop()
