# SPDX-License-Identifier: Apache-2.0
"""Stops and refusals of real engines: ``vllm serve`` and offline ``LLM``."""

# Standard
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
import json
import os
import signal
import sys
import threading
import time

# First Party
from tests.campaigns.connector_trials import Result, sockets_in
from tests.e2e.serving import serving_environment
from tests.support.serving import client, tiny_models
from tests.support.serving.processes import ServerFailedError, ServerProcess
from tests.support.serving.procfs import mapped_segments, session_members
from tests.support.serving.runtime import Runtime, own_machine
from tests.support.serving.servers import HOST, Engine, EngineConfig

CONNECTOR = "RBLNLMCacheConnectorV1"
CHUNK = 256

#: An offline engine: how it ends is the argument.
OFFLINE = """
import sys
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
    globals()["kept"] = llm  # until the interpreter ends

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
        args: More arguments of ``vllm serve``.
        busy: Whether a request is answered at that moment.
        connector: Whether there is a connector.
    """

    name: str
    env: Mapping[str, str] = field(default_factory=dict)
    number: signal.Signals | None = signal.SIGTERM
    args: Sequence[str] = ()
    busy: bool = False
    connector: bool = True


def environment(runtime: Runtime, folder: Path, more: Mapping[str, str]) -> dict:
    """Environment of an engine whose sockets go to a folder of its own."""
    rpc = folder / "rpc"
    rpc.mkdir(parents=True)
    return {
        **serving_environment(runtime, folder.parent / "cache", None),
        **own_machine(folder),
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
    env = environment(runtime, folder, stop.env)
    engine = Engine(
        EngineConfig(
            model=model_in(folder.parent),
            block_size=128,
            max_model_len=1024,
            max_seqs=4,
            num_blocks=14,
            max_batched_tokens=128,
            connector=CONNECTOR,
            connector_module=None,
            extra_args=tuple(stop.args),
        ),
        None,
        env,
        folder,
    )
    if not stop.connector:
        place = engine.process.command.index("--kv-transfer-config")
        del engine.process.command[place : place + 2]
    engine.start()
    try:
        if stop.number is None:
            return _ended(stop.name, engine.process, folder, time.monotonic(), set())
        engine.wait_ready()
        if stop.busy:
            _keep_busy(engine)
        else:
            engine.complete([list(range(3, 403))], 4)
        mapped = segments(engine.process)
        begun = time.monotonic()
        os.kill(engine.process.pid, stop.number)
        return _ended(stop.name, engine.process, folder, begun, mapped)
    finally:
        engine.process.stop()


def offline(runtime: Runtime, folder: Path, name: str, end: str, more: dict) -> Result:
    """Run a program that makes an ``LLM`` and ends."""
    env = environment(runtime, folder, more)
    program = folder / "offline.py"
    program.write_text(OFFLINE)
    transfer = json.dumps({"kv_connector": CONNECTOR, "kv_role": "kv_both"})
    command = [sys.executable, str(program), str(model_in(folder.parent)), end]
    process = ServerProcess(
        name, [*command, transfer], env, folder / "offline.log", folder
    )
    process.start()
    try:
        process.wait_ready(lambda: "answered" in process.log(), 300.0)
    except ServerFailedError:
        process.wait_ended(60.0)
    begun = time.monotonic()
    try:
        return _ended(name, process, folder, begun, segments(process))
    finally:
        process.stop()


def model_in(folder: Path) -> Path:
    """The model of these trials."""
    size = tiny_models.Size(max_positions=4096)
    return tiny_models.make("qwen3", folder / "models", size)


def segments(process: ServerProcess) -> set[Path]:
    """Shared memory that a server and what it started have mapped."""
    members = session_members(process.pid)
    return set().union(*(mapped_segments(pid) for pid in members))


def _keep_busy(engine: Engine) -> None:
    """Let two requests be computed when this returns."""

    def ask(seed: int) -> None:
        prompt = list(range(seed, seed + 400))
        with suppress(client.RequestFailedError):  # stopped, as is wanted
            client.complete_together(engine.port, engine.served_name, [prompt], 500)

    for seed in (3, 50):
        threading.Thread(target=ask, args=(seed,), daemon=True).start()
    url = f"http://{HOST}:{engine.port}/metrics"
    deadline = time.monotonic() + 120
    while client.read_counters(url).total("vllm:num_requests_running") < 1:
        if time.monotonic() > deadline:
            raise engine.process.failure("computed nothing")
        time.sleep(0.05)


def _ended(
    name: str, process: ServerProcess, folder: Path, begun: float, mapped: set[Path]
) -> Result:
    status: int | None
    try:
        status = process.wait_ended(180.0)
    except ServerFailedError:
        status = None
    deadline = time.monotonic() + 10
    while session_members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    seconds = time.monotonic() - begun
    left = [f"process {pid}" for pid in session_members(process.pid)]
    left += sockets_in(folder)
    left += [str(path) for path in mapped if path.exists()]
    return Result(name, status, seconds, left, process.log())
