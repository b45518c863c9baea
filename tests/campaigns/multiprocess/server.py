# SPDX-License-Identifier: Apache-2.0
"""LMCache's server, in a process of the campaign."""

# Future
from __future__ import annotations

# Standard
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
import argparse
import functools
import signal
import threading
import time

# Third Party
from prometheus_client import REGISTRY
import torch

# First Party
from lmcache.v1.distributed import l1_manager
from lmcache.v1.distributed.config import (
    add_storage_manager_args,
    parse_args_to_config,
)
from lmcache.v1.distributed.memory_manager import L1MemoryManager
from lmcache.v1.distributed.storage_controllers import eviction_controller
from lmcache.v1.mp_observability.config import (
    add_observability_args,
    parse_args_to_observability_config,
)
from lmcache.v1.multiprocess import server as servers
from lmcache.v1.multiprocess.config import (
    add_mp_server_args,
    parse_args_to_mp_server_config,
)
from lmcache.v1.multiprocess.modules.engine_driven_transfer import (
    EngineDrivenTransferModule,
)
from tests.campaigns.multiprocess.kv import CHUNK

#: A third of what is ever stored has room.
POOL_GB = 0.002


@functools.cache
def command_line() -> argparse.ArgumentParser:
    """Read the arguments of a server."""
    parser = argparse.ArgumentParser()
    add_mp_server_args(parser)
    # Imports everything that may ever be a server's storage.
    add_storage_manager_args(parser)
    add_observability_args(parser)
    return parser


def serve(conn: Connection, threads: int, port: int, name: str) -> None:
    """Be a server until the campaign says that it is over."""
    native = l1_manager.TTLLock

    class TTLLock:
        """LMCache's, whose time can be over at once."""

        later = 0

        def __init__(self, seconds: int) -> None:
            self._seconds = seconds
            self.reset()

        def reset(self) -> None:
            self._lock, self._since = native(self._seconds), TTLLock.later

        def lock(self) -> None:
            if self._since != TTLLock.later:
                self.reset()
            self._lock.lock()

        def unlock(self) -> None:
            self._lock.unlock()

        def is_locked(self) -> bool:
            return self._since == TTLLock.later and self._lock.is_locked()

    l1_manager.TTLLock = TTLLock  # type: ignore[assignment,misc]
    frees = L1MemoryManager.free

    def poison(manager: L1MemoryManager, chunks: list[Any]) -> Any:
        """Nobody reads what nobody has."""
        for chunk in chunks:
            chunk.tensor.view(torch.uint8).fill_(0xA5)
        return frees(manager, chunks)

    L1MemoryManager.free = poison  # type: ignore[assignment,method-assign]
    # Not once a second.
    eviction_controller.time = SimpleNamespace(  # type: ignore[assignment]
        sleep=lambda _: time.sleep(0.02), monotonic=time.monotonic
    )
    arguments = f"--host 127.0.0.1 --port {port} --chunk-size {CHUNK} --l1-size-gb"
    arguments += f" {POOL_GB} --eviction-policy LRU --supported-transfer-mode"
    arguments += f" engine_driven --eviction-trigger-watermark 0.7 --shm-name={name}"
    arguments += f" --max-workers {threads}"
    parsed = command_line().parse_args(arguments.split())
    started = servers.run_cache_server(
        parse_args_to_mp_server_config(parsed),
        parse_args_to_config(parsed),
        parse_args_to_observability_config(parsed),
        return_engine=True,
        start_prometheus_http_server=False,
    )
    assert started is not None
    requests, engine = started
    [module] = [
        each for each in engine._modules if isinstance(each, EngineDrivenTransferModule)
    ]

    def forget(*_: Any) -> None:
        reap = module.reap_stale_instances
        threading.Thread(target=reap, args=(-1.0, -1.0)).start()

    signal.signal(signal.SIGUSR1, forget)
    conn.send(("ready", None))
    while (said := conn.recv()[0]) != "end":
        if said == "clear":
            engine.clear()
        state = engine.report_status()
        if said == "later":
            TTLLock.later += 1
        found = dict(state["storage_manager"]["l1_manager"])
        found["workers"] = len(state["registered_non_cuda_instance_ids"])
        found["hit tokens"] = sum(
            sample.value
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name == "lmcache_mp_lookup_hit_tokens_total"
        )
        conn.send(("status", found))
    requests.close()
    engine.close()
    conn.send(("ended", None))
