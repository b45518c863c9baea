# SPDX-License-Identifier: Apache-2.0
"""The process that imports vLLM and forks for each trial, see ``connector_trials``."""

# Standard
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import gc
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback

# First Party
from tests.campaigns.connector_trials import Result, Trial, sockets_in


def _config(model: str) -> Any:
    # Third Party
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=model,
        model_impl="vllm",
        block_size=128,
        max_model_len=1024,
        max_num_batched_tokens=128,
        max_num_seqs=4,
        kv_transfer_config=KVTransferConfig(
            kv_connector="RBLNLMCacheConnectorV1", kv_role="kv_both"
        ),
    ).create_engine_config()


def _serve(order: Path, models: Path) -> None:
    # Third Party
    from vllm.model_executor.models import registry

    # First Party
    import lmcache_rbln.integration.vllm.connector  # noqa: F401

    # vLLM imports itself once more to look at a model's class, for the sake of CUDA.
    registry._run_in_subprocess = lambda fn: fn()
    # LMCache collects garbage as it starts, which takes longer than all the rest over
    # what is imported here.
    gc.freeze()
    configs: dict[str, Any] = {}
    for number, given in enumerate(json.loads(order.read_text())):
        trial = Trial(**given)
        if trial.model not in configs:
            configs[trial.model] = _config(str(models / trial.model))
        config = configs[trial.model]
        folder = order.parent / f"{number}-{trial.name}"
        folder.mkdir()
        begun = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _redirect(folder / "log")
            if trial.end == "engine-ends":
                process = multiprocessing.get_context("fork").Process(
                    target=_trial, args=(trial, config, folder)
                )
                process.start()
                process.join()
                code = process.exitcode or 0
                os._exit(code if code >= 0 else 100)
            _trial(trial, config, folder)
            return  # to the end of the interpreter
        status = _wait(pid, 60.0)
        log = (folder / "log").read_text(errors="replace")
        stopped = folder / "stopping"
        since = float(stopped.read_text()) if stopped.exists() else begun
        left = sockets_in(folder)
        threads = folder / "threads"
        left += json.loads(threads.read_text()) if threads.exists() else []
        result = Result(trial.name, status, time.monotonic() - since, left, log)
        print(json.dumps(vars(result)), flush=True)


def _redirect(log: Path) -> None:
    sys.stdout.flush()
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)


def _wait(pid: int, timeout: float) -> int | None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return None


def _trial(trial: Trial, config: Any, folder: Path) -> None:
    os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
    os.environ["RBLN_VISIBLE_DEVICES"] = "0"
    for name, value in trial.env.items():
        os.environ[name] = value.replace("@", str(folder))
    config.kv_transfer_config.kv_connector_extra_config = trial.extra
    config.kv_transfer_config.kv_role = trial.role
    parallel = config.parallel_config
    parallel.tensor_parallel_size = parallel.world_size = trial.ranks
    others = [
        multiprocessing.get_context("fork").Process(
            target=_other_rank, args=(trial, config, folder, rank)
        )
        for rank in range(1, trial.ranks)
    ]
    for process in others:
        process.start()
    before = set(threading.enumerate())
    started: list[Any] = []
    try:
        started.append(_start_worker(config, folder, trial))
        started.append(_start_scheduler(config, trial))
        if trial.works:
            _store(started[0])
            lookup = _look_up(started[1], trial)
            (folder / "found").write_text(lookup)
            (folder / "found").rename(folder / "looked-up")
            _restore(started[0], trial, lookup)
        for process in others:
            process.join(30.0)
            assert process.exitcode == 0, f"rank: {process.exitcode}"
        if trial.fails:
            raise RuntimeError("warm-up failed")
    except Exception:
        (folder / "stopping").write_text(str(time.monotonic()))
        traceback.print_exc()
        if not started:
            _note_threads(folder, before)
        sys.exit(1)
    (folder / "stopping").write_text(str(time.monotonic()))
    if trial.end == "stopped":
        for connector in started:
            connector.shutdown()
        _note_threads(folder, before)
        return
    # Something holds the engine until the process ends, as a user's variable does.
    sys.modules["__main__"].__dict__["engine"] = started


def _other_rank(trial: Trial, config: Any, folder: Path, rank: int) -> None:
    os.environ["RBLN_VISIBLE_DEVICES"] = str(rank)
    config.parallel_config.rank = rank
    worker = _start_worker(config, folder, trial)
    _store(worker)
    lookup = folder / "looked-up"
    deadline = time.monotonic() + 30
    while not lookup.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    _restore(worker, trial, lookup.read_text())
    worker.shutdown()


def _note_threads(folder: Path, before: set[threading.Thread]) -> None:
    def left() -> list[str]:
        new = (t.name for t in threading.enumerate() if t not in before)
        return sorted(n for n in new if not n.startswith("rbln-sim"))

    deadline = time.monotonic() + 5.0
    while left() and time.monotonic() < deadline:
        time.sleep(0.01)  # for executors that were not waited for
    names = [f"thread {name}" for name in left()]
    (folder / "threads").write_text(json.dumps(names))


def _layers(config: Any, trial: Trial) -> tuple[Any, tuple[int, ...]]:
    """Return vLLM's plan of the KV cache, and the shape of a layer."""
    # Third Party
    from vllm.v1 import kv_cache_interface as kv
    import torch

    model = config.model_config
    heads = model.get_num_kv_heads(config.parallel_config)
    size = model.get_head_size()
    kind = kv.MLAAttentionSpec if trial.model == "mla" else kv.FullAttentionSpec
    spec = kind(block_size=128, num_kv_heads=heads, head_size=size, dtype=torch.float16)
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(2)]
    plan = kv.KVCacheConfig(14, [], [kv.KVCacheGroupSpec(names, spec)])
    if trial.model == "mla":
        return plan, (14, 128, size)
    first = (2, 14) if trial.kv_first else (14, 2)
    return plan, (*first, heads, 1, 128, size)


def _start_worker(config: Any, folder: Path, trial: Trial) -> Any:
    """Make a worker's connector and give it a KV cache, as vLLM does."""
    # Third Party
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
    )
    import torch

    # First Party
    from lmcache_rbln.integration.vllm.connector import RBLNLMCacheConnectorV1

    rank = config.parallel_config.rank
    with set_current_vllm_config(config):
        init_distributed_environment(
            trial.ranks, rank, f"file://{folder}/group", rank, "gloo"
        )
        initialize_model_parallel(trial.ranks, 1)
    plan, shape = _layers(config, trial)
    worker = RBLNLMCacheConnectorV1(config, KVConnectorRole.WORKER, plan)
    names = plan.kv_cache_groups[0].layer_names
    worker.register_kv_caches(
        {name: torch.randn(shape).half().to("rbln:0") for name in names}
    )
    return worker


def _start_scheduler(config: Any, trial: Trial) -> Any:
    # Third Party
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    # First Party
    from lmcache_rbln.integration.vllm.connector import RBLNLMCacheConnectorV1

    plan, _ = _layers(config, trial)
    return RBLNLMCacheConnectorV1(config, KVConnectorRole.SCHEDULER, plan)


_TOKENS = list(range(3, 3 + 512))


def _store(worker: Any) -> None:
    """Store the first four blocks, as a step does."""
    # Third Party
    import torch

    # First Party
    from lmcache_rbln._lmcache import in_process
    from lmcache_rbln.integration.vllm.connector import RBLNConnectorMetadata

    adapter = in_process("integration.vllm.vllm_v1_adapter")
    spec = adapter.SaveSpec(0, True)
    save = adapter.ReqMeta("stored", _TOKENS, torch.arange(512), True, spec)
    worker.bind_connector_metadata(RBLNConnectorMetadata([save]))
    worker.wait_for_save()
    worker.clear_connector_metadata()


def _look_up(scheduler: Any, trial: Trial) -> str:
    """Look the tokens up until all are there; return the last look-up's id."""
    stored = 0 if trial.role == "kv_consumer" else 512
    client = scheduler._lmcache_engine.lookup_client
    deadline = time.monotonic() + 30
    number, found = 0, -1
    while found != stored and time.monotonic() < deadline:
        number += 1
        # As LMCache's adapter asks: -1 is a look-up that has not begun.
        found = client.lookup_cache(f"looked-up-{number}")
        if found == -1:
            found = client.lookup(_TOKENS, f"looked-up-{number}")
        while found is None and time.monotonic() < deadline:
            time.sleep(0.01)
            found = client.lookup_cache(f"looked-up-{number}")
    print("found", found, flush=True)
    return f"looked-up-{number}"


def _restore(worker: Any, trial: Trial, lookup: str) -> None:
    """Restore into the next four blocks, and compare."""
    # Third Party
    import torch

    # First Party
    from lmcache_rbln._lmcache import in_process
    from lmcache_rbln.integration.vllm.connector import RBLNConnectorMetadata

    if trial.role == "kv_consumer":
        return
    slots = torch.arange(512) + 512
    adapter = in_process("integration.vllm.vllm_v1_adapter")
    spec = adapter.LoadSpec(0, 512, True)
    load = adapter.ReqMeta(lookup, _TOKENS, slots, load_spec=spec)
    worker.bind_connector_metadata(RBLNConnectorMetadata([load]))
    worker.start_load_kv(SimpleNamespace(attn_metadata=object()))
    worker.clear_connector_metadata()
    for kv in worker._lmcache_engine.kv_caches.values():
        blocks = kv.cpu().movedim(int(trial.kv_first), 0)
        assert torch.equal(blocks[:4], blocks[4:8]), "restored other bytes"
    print("restored equal", flush=True)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), Path(sys.argv[2]))
