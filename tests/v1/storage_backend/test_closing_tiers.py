# SPDX-License-Identifier: Apache-2.0
"""The CPU tier's memory is there as long as another tier copies from it."""

# Standard
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import threading

# Third Party
from one_worker import CHUNK, PagedKV, engine_of
import pytest
import torch

# First Party
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.storage_backend.connector.fs_connector import FSConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend
from lmcache.v1.storage_backend import storage_manager

pytestmark = pytest.mark.npu

LAYERS, HIDDEN = 2, 8


class Filled(PagedKV):
    """Fills every chunk with one number."""

    def batched_from_gpu(self, objs: list[Any], *_: Any, **__: Any) -> None:
        for obj in objs:
            obj.tensor.fill_(1.5)


def test_a_write_under_way_is_ended_before_the_cpu_tier_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, closing, gone = (threading.Event() for _ in range(3))
    when: list[str] = []
    put, close, close_cpu = (
        FSConnector.put,
        RemoteBackend.close,
        LocalCPUBackend.close,
    )

    async def slow_put(self: Any, key: Any, memory_obj: Any) -> None:
        def write() -> None:
            begun.set()
            closing.wait(300)
            gone.wait(0.2)  # what used to come first

        await self.loop.run_in_executor(None, write)
        when.append("copied")
        await put(self, key, memory_obj)

    def announced_close(self: Any) -> None:
        closing.set()
        close(self)

    def noted_close(self: Any) -> None:
        when.append("closed")
        gone.set()
        close_cpu(self)

    monkeypatch.setattr(FSConnector, "put", slow_put)
    monkeypatch.setattr(RemoteBackend, "close", announced_close)
    monkeypatch.setattr(LocalCPUBackend, "close", noted_close)
    with engine_of(Filled(), LAYERS, HIDDEN, remote_url=f"fs://host:0/{tmp_path}") as e:
        e.store(list(range(CHUNK)), req_id="r")
        assert begun.wait(300)
    assert when == ["copied", "closed"]
    [file] = tmp_path.glob("*.data")
    wanted = torch.full((LAYERS, CHUNK, HIDDEN), 1.5).numpy().tobytes()
    assert file.read_bytes().endswith(wanted)


def test_a_start_that_fails_is_told_and_closes_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []
    tier = SimpleNamespace(close=lambda: closed.append("tier"))

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(
        storage_manager,
        "CreateStorageBackends",
        lambda *_, **__: OrderedDict(Tier=tier),
    )
    manager: Any = storage_manager.StorageManager
    monkeypatch.setattr(manager, "_get_allocator_backend", fail)
    metadata = SimpleNamespace(role="worker", worker_id=0, use_mla=False)
    with pytest.raises(RuntimeError, match="planted"):
        manager(LMCacheEngineConfig.from_defaults(), metadata, None)
    assert closed == ["tier"]
