# SPDX-License-Identifier: Apache-2.0
"""LMCache's connector, with a copy of every block that it stores or restores.

Loaded by ``vllm serve`` in place of LMCache's own through
``kv_connector_module_path``. Blocks are read through plain indexing and ``.cpu()``,
never through the backend under test. Such a read waits for the device, so it comes
where it cannot hide a missing wait: stored blocks are read when their request has
finished and before vLLM may free them, long after the store was submitted; restored
blocks when the load is reported to vLLM, before any forward runs on them.

Settings, since a connector gets no others from a test:
``KV_PROBE_FOLDER`` receives one ``torch.save`` file per transfer;
``KV_PROBE_BLOCK_AXIS`` is the block axis of each layer's tensor, said by the test so
that nothing is detected here. The worker obeys files in that folder, and removes them:
``fail-next-load`` (the NPU fails in the next load), ``hold-next-load`` (about to write,
the next load makes ``load-held``, and goes on when that is gone).
"""

# Standard
from pathlib import Path
from typing import Any
import itertools
import os
import time

# Third Party
from lmcache_release import token_ids
import torch

# First Party
from lmcache.integration.vllm import lmcache_mp_connector as stock
from lmcache.v1.platform.devices.rbln import transfer_context


class LMCacheMPConnector(stock.LMCacheMPConnector):
    """LMCache's connector that also writes down the blocks it moves."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Remember the layers, and register them as usual."""
        self._probe_layers = list(kv_caches.values())
        self._probe_axis = int(os.environ["KV_PROBE_BLOCK_AXIS"])
        self._probe_folder = Path(os.environ["KV_PROBE_FOLDER"])
        self._probe_numbers = itertools.count()
        self._probe_stores: dict[str, list[Any]] = {}
        self._probe_loads: dict[str, Any] = {}
        self._probe_scatter = transfer_context.scatter_cpu_to_paged_kv
        transfer_context.scatter_cpu_to_paged_kv = self._scatter_as_told
        for name, layer in kv_caches.items():
            print(
                f"KV_PROBE layer {name} {tuple(layer.shape)} {layer.dtype} "
                f"{layer.device}",
                flush=True,
            )
        super().register_kv_caches(kv_caches)

    def wait_for_save(self) -> None:
        """Submit stores as usual, and remember them."""
        super().wait_for_save()
        for meta in self._requests("STORE"):
            self._probe_stores.setdefault(meta.request_id, []).append(meta.op)

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        """Write down what requests that ended have stored, and what is restored.

        The blocks still exist, and no forward has run on restored ones.
        """
        for request_id in finished_req_ids:
            for op in self._probe_stores.pop(request_id, []):
                self._write_down("STORE", op)
        stored, restored = super().get_finished(finished_req_ids)
        for request_id in restored or ():
            self._write_down("RETRIEVE", self._probe_loads.pop(request_id))
        return stored, restored

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Submit loads as usual, and remember them."""
        super().start_load_kv(forward_context, **kwargs)
        for meta in self._requests("RETRIEVE"):
            self._probe_loads[meta.request_id] = meta.op

    def _scatter_as_told(self, *args: Any, **kwargs: Any) -> None:
        if self._was_told("fail-next-load"):
            raise RuntimeError("planted failure of the NPU")
        if self._was_told("hold-next-load"):
            held = self._probe_folder / "load-held"
            held.touch()
            while held.exists():
                time.sleep(0.01)
        self._probe_scatter(*args, **kwargs)

    def _was_told(self, order: str) -> bool:
        path = self._probe_folder / order
        found = path.exists()
        path.unlink(missing_ok=True)
        return found

    def _requests(self, direction: str) -> list[Any]:
        requests = self._get_connector_metadata().requests
        return [meta for meta in requests if meta.direction == direction]

    def _write_down(self, direction: str, op: Any) -> None:
        ids = op.flat_block_ids
        blocks = torch.stack(
            [
                torch.stack([layer.select(self._probe_axis, i).cpu() for i in ids])
                for layer in self._probe_layers
            ]
        )
        path = self._probe_folder / f"{next(self._probe_numbers):05d}.pt"
        unfinished = path.with_suffix(".part")
        torch.save(
            {
                "direction": direction,
                "token_ids": token_ids(op),
                "start": op.start,
                "end": op.end,
                "block_ids": list(ids),
                "blocks": blocks,
            },
            unfinished,
        )
        unfinished.rename(path)
