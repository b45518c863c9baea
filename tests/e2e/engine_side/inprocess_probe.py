# SPDX-License-Identifier: Apache-2.0
"""``RBLNLMCacheConnectorV1`` that can be watched and made to fail.

In the folder ``INPROCESS_PROBE_FOLDER`` the worker

- keeps ``state.json``: chunks held, how many are pinned, lookups not yet released;
- writes every stored chunk's bytes to ``<chunk hash>.chunk``;
- obeys the files ``lose`` (forget every chunk between a lookup and its load),
  ``fail-load`` and ``fail-store`` (the device fails half-way through the next
  transfer), and removes them;
- takes ``SLOW_S`` seconds for every step while there is a file ``go-slow``.
"""

# Standard
from pathlib import Path
from typing import Any
import json
import os
import time

# Third Party
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

# First Party
from lmcache.lmcache_native import TransferDirection
from lmcache_rbln.integration.vllm import connector

SLOW_S = 0.3
_ORDERS = {
    TransferDirection.H2D: "fail-load",
    TransferDirection.D2H: "fail-store",
}


class RBLNLMCacheConnectorV1(connector.RBLNLMCacheConnectorV1):
    """The connector with a probe."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._folder = Path(os.environ["INPROCESS_PROBE_FOLDER"])
        if self.role == KVConnectorRole.WORKER:
            assert self._paged_kv is not None
            self._move = self._paged_kv._move_host
            self._paged_kv._move_host = self._move_or_fail  # type: ignore[method-assign]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = any(
            request.load_spec is not None and request.load_spec.can_load
            for request in self._get_connector_metadata().requests
        )
        if loads and self._ordered("lose"):
            tier = self._engine().storage_manager.local_cpu_backend
            for key in list(self._chunks()):
                tier.remove(key)
        super().start_load_kv(forward_context, **kwargs)
        self._write_state()
        if (self._folder / "go-slow").exists():
            time.sleep(SLOW_S)

    def wait_for_save(self) -> None:
        super().wait_for_save()
        for key, obj in list(self._chunks().items()):
            path = self._folder / f"{key.chunk_hash:x}.chunk"
            if not path.exists() and obj.tensor is not None:
                part = path.with_suffix(".part")
                part.write_bytes(obj.tensor.contiguous().view(-1).numpy().tobytes())
                part.rename(path)
        self._write_state()

    def _chunks(self) -> Any:
        return self._engine().storage_manager.local_cpu_backend.hot_cache

    def _engine(self) -> Any:
        return self._lmcache_engine.lmcache_engine

    def _ordered(self, order: str) -> bool:
        path = self._folder / order
        if not path.exists():
            return False
        path.unlink()
        return True

    def _move_or_fail(self, kv: Any, direction: Any, run: list[Any]) -> None:
        if not self._ordered(_ORDERS[direction]):
            self._move(kv, direction, run)
            return
        self._move(kv, direction, run[: len(run) // 2])
        raise RuntimeError("the probe was told to fail this transfer")

    def _write_state(self) -> None:
        chunks = list(self._chunks().values())
        state = {
            "chunks": len(chunks),
            "pinned": sum(chunk.is_pinned for chunk in chunks),
            "referenced": sum(chunk.get_ref_count() > 1 for chunk in chunks),
            "lookups": len(self._engine().lookup_pins),
        }
        part = self._folder / "state.part"
        part.write_text(json.dumps(state))
        part.rename(self._folder / "state.json")
