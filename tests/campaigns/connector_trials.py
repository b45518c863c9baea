# SPDX-License-Identifier: Apache-2.0
"""Starts and stops the in-process connector without a model, many times.

Another process imports vLLM once and forks for each trial, as vLLM forks its engine. A
trial makes the connector in both roles over a KV cache on the NPU, as an engine with
one worker has them, stores a prompt, and ends in one of the ways in which engines end.
What it leaves behind is looked at from outside.
"""

# Standard
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
import json
import os
import re
import subprocess
import sys

ROOT = Path(__file__).resolve().parents[2]
RDS_EXTRA = {
    "storage_plugin.RDSBackend.module_path": "lmcache_rbln.storage_plugin.rds_backend",
    "storage_plugin.RDSBackend.class_name": "RDSBackend",
    "rds_buffer_size": 64,
}
RDS = {
    "LMCACHE_LOCAL_CPU": "False",
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "0",
    "LMCACHE_STORAGE_PLUGINS": "RDSBackend",
}
#: The simulated NVMe takes this long for a write, so that some are under way.
SLOW_WRITES = "delay:write:1:300ms+sticky"


def rds(**changes: object) -> dict[str, str]:
    """Environment of the RDS tier, with other values in the extra config."""
    return {**RDS, "LMCACHE_EXTRA_CONFIG": json.dumps(RDS_EXTRA | changes)}


#: Storage tiers by name: what LMCache is told in the environment. ``@`` is the trial's
#: folder.
TIERS: dict[str, dict[str, str]] = {
    "cpu": {},
    "disk": {
        "LMCACHE_LOCAL_CPU": "False",
        "LMCACHE_LOCAL_DISK": "@/disk",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "0.05",
    },
    "remote": {
        "LMCACHE_LOCAL_CPU": "False",
        "LMCACHE_REMOTE_URL": "fs://localhost:0/@/remote",
    },
    "mock": {
        "LMCACHE_LOCAL_CPU": "False",
        "LMCACHE_REMOTE_URL": "mock://1/?peeking_latency=1&read_throughput=2",
    },
    "rds": rds(),
    "rds-busy": rds() | {"RBLN_SIM_RDS_FAULTS": SLOW_WRITES},
    "async": {"LMCACHE_ENABLE_ASYNC_LOADING": "True"},
    "rds-async": rds() | {"LMCACHE_ENABLE_ASYNC_LOADING": "True"},
    "api-server": {
        "LMCACHE_INTERNAL_API_SERVER_ENABLED": "True",
        "LMCACHE_INTERNAL_API_SERVER_SOCKET_PATH_PREFIX": "@/api",
    },
    "statistics": {"LMCACHE_ENABLE_CHUNK_STATISTICS": "True"},
}

_VLLM_SOCKET = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

#: Ways to end: vLLM stops the connectors; the process that multiprocessing started ends
#: without; a process of its own ends without.
ENDS = ("stopped", "engine-ends", "process-ends")


@dataclass
class Trial:
    """One start and one end.

    Attributes:
        name: Unique among the trials of a run.
        env: Environment of LMCache.
        extra: ``kv_connector_extra_config``.
        end: One of ``ENDS``.
        works: Whether a prompt is stored and looked up before the end.
        fails: Where the start of the engine fails behind the connector, as in warm-up.
        role: vLLM's ``kv_role``.
        kv_first: Whether the KV cache is K/V-first, else blocks-first.
        model: Name of the tiny model; ``mla`` has a latent KV cache.
        ranks: Workers, each on an NPU and, but for the first, in a process of its own.
    """

    name: str
    env: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    end: str = "stopped"
    works: bool = True
    fails: bool = False
    role: str = "kv_both"
    kv_first: bool = False
    model: str = "qwen3"
    ranks: int = 1


@dataclass
class Result:
    """What was seen of a trial.

    Attributes:
        trial: Its name.
        status: Exit status; negative for a signal, ``None`` if it had to be killed.
        seconds: From the stop, or the refusal, to the end of the process.
        left: Files, segments and threads that are left.
        log: All that it said.
        waited: Whether vLLM waited for clients of an engine that it had killed, until
            they went away; it does so without a connector too.
    """

    trial: str
    status: int | None
    seconds: float
    left: list[str]
    log: str
    waited: bool = False


def run(
    folder: Path, trials: Sequence[Trial], env: dict[str, str], models: Path
) -> Iterator[Result]:
    """Run trials one after the other.

    Args:
        folder: Where they leave their logs.
        trials: What to run.
        env: Environment that leads to the NPU.
        models: Folder with the configurations of the tiny models.

    Yields:
        The results, in that order.
    """
    order = folder / "trials.json"
    order.write_text(json.dumps([vars(trial) for trial in trials]))
    command = [sys.executable, "-m", "tests.campaigns.connector_process"]
    paths = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    with (
        (folder / "zygote.log").open("wb") as log,
        subprocess.Popen(
            [*command, str(order), str(models)],
            env={**env, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield Result(**json.loads(line))
    if process.returncode:
        tail = (folder / "zygote.log").read_text(errors="replace")[-3000:]
        raise RuntimeError(f"the trials ended with status {process.returncode}: {tail}")


def sockets_in(folder: Path) -> list[str]:
    """List the sockets below a folder, but those that vLLM itself leaves there.

    Its message queues between ranks have a UUID for a name.
    """
    found = (path for path in folder.rglob("*") if path.is_socket())
    return [str(path) for path in found if not _VLLM_SOCKET.fullmatch(path.name)]


def problems(result: Result, statuses: tuple[int, ...], within: float) -> list[str]:
    """Say what is wrong with a result.

    Args:
        result: Of a trial.
        statuses: Exit statuses that are right.
        within: Longest time from the stop to the end, in seconds.

    Returns:
        One sentence for each fault.
    """
    wrong = []
    if result.status is None:
        wrong.append("hung and was killed")
    elif result.status not in statuses:
        wrong.append(f"status {result.status}, wanted {statuses}")
    if "Assertion failed" in result.log:
        wrong.append("libzmq: Assertion failed")
    if result.left:
        wrong.append(f"left {result.left}")
    if result.seconds > within:
        wrong.append(f"ended after {result.seconds:.1f} s, wanted {within:g}")
    return wrong
