# SPDX-License-Identifier: Apache-2.0
"""Stops and refusals of real engines: ``vllm serve`` and offline ``LLM``."""

# Standard
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
import json
import os
import signal
import sys
import time

# First Party
from tests.campaigns.connector_trials import Result, sockets_in
from tests.campaigns.in_flight import InFlight
from tests.e2e.serving import serving_environment
from tests.support.serving import servers, tiny_models
from tests.support.serving.processes import ServerFailedError, ServerProcess
from tests.support.serving.procfs import mapped_segments, session_members
from tests.support.serving.runtime import Runtime, own_machine
from tests.support.serving.servers import (
    CacheServer,
    CacheServerConfig,
    Engine,
    EngineConfig,
)

CONNECTOR = "RBLNLMCacheConnectorV1"
MP_CONNECTOR = servers.CONNECTOR
CHUNK = 256
#: So long is waited for the end of what is stopped, in seconds.
PATIENCE_S = 60.0
#: Of ``vllm serve`` when its engine is dead and a request has no end of its answer yet.
WAITS_FOR_CLIENTS = "Waiting for connections to close"

#: An offline engine: how it ends is an argument, and whether in several processes.
OFFLINE = """
import os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = sys.argv[4]
from vllm import LLM, SamplingParams

def main(model, end, transfer):
    llm = LLM(model, model_impl="vllm", block_size=128, max_model_len=1024,
              max_num_batched_tokens=128, max_num_seqs=4, num_gpu_blocks_override=14,
              enable_prefix_caching=False, skip_tokenizer_init=True,
              kv_transfer_config=transfer)
    prompt = {"prompt_token_ids": list(range(3, 403))}
    llm.generate(prompt, SamplingParams(max_tokens=4, detokenize=False))
    print("answered", flush=True)
    if end == "scope":
        return
    kept = sys.modules["kept"] = type(sys)("kept")
    kept.llm = llm  # until the interpreter ends

if __name__ == "__main__":
    import json
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
    if sys.argv[2] == "scope":
        import gc, time
        gc.collect()
    print("end of main", flush=True)
"""


@dataclass
class Stop:
    """One start and one stop of a real engine.

    Attributes:
        name: Of the trial.
        env: LMCache's environment.
        number: Signal that stops it; ``None`` for one that refuses to start.
        drains: So long vLLM lets requests end first, in seconds.
        busy: Whether requests are answered at that moment.
        connector: Name of its connector, if it has one.
        ranks: NPUs, each with a worker.
    """

    name: str
    env: Mapping[str, str] = field(default_factory=dict)
    number: signal.Signals | None = signal.SIGTERM
    drains: int = 0
    busy: bool = False
    connector: str | None = CONNECTOR
    ranks: int = 1

    @property
    def args(self) -> tuple[str, ...]:
        """More arguments of ``vllm serve``."""
        drain = ("--shutdown-timeout", str(self.drains)) if self.drains else ()
        ranks = ("--tensor-parallel-size", str(self.ranks)) if self.ranks > 1 else ()
        # vllm-rbln's second rank gets wrong tokens otherwise, and ends.
        bare = ("--no-async-scheduling",) if ranks and not self.connector else ()
        return (*drain, *ranks, *bare)


def environment(
    runtime: Runtime, folder: Path, more: Mapping[str, str], devices: int = 1
) -> dict[str, str]:
    """Environment of an engine whose sockets go to a folder of its own."""
    rpc = folder / "rpc"
    rpc.mkdir(parents=True)
    return {
        **serving_environment(runtime, folder.parent / "cache", None),
        **own_machine(folder, devices),
        "PYTHONHASHSEED": "0",
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.01",
        "LMCACHE_CHUNK_SIZE": str(CHUNK),
        "RBLN_SIM_MEMORY_GIB": "8",
        "OMP_NUM_THREADS": "1",
        "VLLM_RPC_BASE_PATH": str(rpc),
        **{name: value.replace("@", str(folder)) for name, value in more.items()},
    }


def serve(runtime: Runtime, folder: Path, stop: Stop) -> Result:
    """Start ``vllm serve``, stop it and look at what is left."""
    env = environment(runtime, folder, stop.env, stop.ranks)
    cache: CacheServer | None = None
    if stop.connector == MP_CONNECTOR:
        shm_name = f"start_stop_{os.getpid()}_{folder.name}"
        config = CacheServerConfig(CHUNK, shm_name=shm_name, l1_size_gb=0.1)
        cache = CacheServer(config, env, folder)
        cache.start()
        cache.wait_ready()
    try:
        theirs = segments(cache.process) if cache is not None else set()
        return _serve(_engine(stop, folder, env, cache), folder, stop, theirs)
    finally:
        if cache is not None:
            cache.stop()


def _engine(
    stop: Stop, folder: Path, env: dict[str, str], cache: CacheServer | None
) -> Engine:
    config = EngineConfig(
        model=model_in(folder.parent),
        block_size=128,
        max_model_len=1024,
        max_seqs=4,
        num_blocks=14,
        max_batched_tokens=128,
        connector=stop.connector or CONNECTOR,
        connector_module=None if cache is None else servers.CONNECTOR_MODULE,
        extra_args=stop.args,
    )
    engine = Engine(config, None if cache is None else cache.port, env, folder)
    if stop.connector is None:
        place = engine.process.command.index("--kv-transfer-config")
        del engine.process.command[place : place + 2]
    return engine


def _serve(engine: Engine, folder: Path, stop: Stop, theirs: set[Path]) -> Result:
    engine.start()
    try:
        if stop.number is None:
            return _ended(stop.name, engine.process, folder, set())
        engine.wait_ready()
        in_flight = None
        if stop.busy:
            # What drains is to end well within its time.
            in_flight = InFlight(engine, answer_tokens=30 if stop.drains else 500)
        else:
            engine.complete([list(range(3, 403))], 4)
        mapped = segments(engine.process) - theirs
        os.kill(engine.process.pid, stop.number)
        patience_s = PATIENCE_S + stop.drains
        result = _ended(
            stop.name, engine.process, folder, mapped, in_flight, patience_s
        )
        if stop.drains and in_flight is not None:
            result.left += in_flight.cut_short()
        return result
    finally:
        if engine.process.is_running():
            engine.process.kill()


def offline(
    runtime: Runtime,
    folder: Path,
    name: str,
    end: str,
    several: bool,
    tier: dict[str, str],
) -> Result:
    """Run a program that makes an ``LLM`` and ends."""
    env = environment(runtime, folder, tier)
    program = folder / "offline.py"
    program.write_text(f"#!{sys.executable}\n{OFFLINE}")
    program.chmod(0o755)
    transfer = json.dumps({"kv_connector": CONNECTOR, "kv_role": "kv_both"})
    command = [str(program), str(model_in(folder.parent)), end, transfer]
    command.append(str(int(several)))
    process = ServerProcess(name, command, env, folder / "offline.log", folder)
    process.start()
    try:
        process.wait_ready(lambda: "answered" in process.log(), 300.0)
        return _ended(name, process, folder, segments(process))
    except ServerFailedError:  # ended before it was seen to have answered
        return _ended(name, process, folder, set())
    finally:
        if process.is_running():
            process.kill()


def model_in(folder: Path) -> Path:
    """The model of these trials."""
    size = tiny_models.Size(max_positions=4096)
    return tiny_models.make("qwen3", folder / "models", size)


def segments(process: ServerProcess) -> set[Path]:
    """Shared memory that a server and what it started have mapped."""
    members = session_members(process.pid)
    return set().union(*(mapped_segments(pid) for pid in members))


def _ended(
    name: str,
    process: ServerProcess,
    folder: Path,
    mapped: set[Path],
    in_flight: InFlight | None = None,
    patience_s: float = PATIENCE_S,
) -> Result:
    begun = time.monotonic()
    waited = False
    while process.is_running() and time.monotonic() < begun + patience_s:
        if in_flight and not waited and _waits_for_clients(process):
            # Longer than any wait for the engine: it is dead, and so is the answer.
            waited = not process.ends_within(5.0)
            if waited:
                in_flight.hang_up()
                begun = time.monotonic()
        time.sleep(0.05)
    status = None if process.is_running() else process.wait_ended(0.0)
    deadline = time.monotonic() + 10
    while session_members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    seconds = time.monotonic() - begun
    left = [f"process {pid}" for pid in session_members(process.pid)]
    left += sockets_in(folder)
    left += [str(path) for path in mapped if path.exists()]
    return Result(name, status, seconds, left, process.log(), waited)


def _waits_for_clients(process: ServerProcess) -> bool:
    lines = process.log().splitlines()
    return bool(lines) and WAITS_FOR_CLIENTS in lines[-1]
