# SPDX-License-Identifier: Apache-2.0
"""LMCache's connector, with a copy of every block that it stores or restores.

Loaded by ``vllm serve`` in place of LMCache's own through
``kv_connector_module_path``. Blocks are read through plain indexing and ``.cpu()``,
never through the backend under test: before a store is submitted, and after a load
has returned but before any forward runs on it.

Settings, since a connector gets no others from a test:
``KV_PROBE_FOLDER`` receives one ``torch.save`` file per transfer;
``KV_PROBE_BLOCK_AXIS`` is the block axis of each layer's tensor, said by the test so
that nothing is detected here.
"""

# Standard
from pathlib import Path
from typing import Any
import itertools
import os

# Third Party
import torch

# First Party
from lmcache.integration.vllm import lmcache_mp_connector as stock


class LMCacheMPConnector(stock.LMCacheMPConnector):
    """LMCache's connector that also writes down the blocks it moves."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Remember the layers, and register them as usual."""
        self._probe_layers = list(kv_caches.values())
        self._probe_axis = int(os.environ["KV_PROBE_BLOCK_AXIS"])
        self._probe_folder = Path(os.environ["KV_PROBE_FOLDER"])
        self._probe_numbers = itertools.count()
        for name, layer in kv_caches.items():
            print(
                f"KV_PROBE layer {name} {tuple(layer.shape)} {layer.dtype} "
                f"{layer.device}",
                flush=True,
            )
        super().register_kv_caches(kv_caches)

    def wait_for_save(self) -> None:
        """Write down what is about to be stored, then store it."""
        self._write_down("STORE")
        super().wait_for_save()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load, which ends before this returns, then write down what arrived."""
        super().start_load_kv(forward_context, **kwargs)
        self._write_down("RETRIEVE")

    def _write_down(self, direction: str) -> None:
        for meta in self._get_connector_metadata().requests:
            if meta.direction != direction:
                continue
            ids = meta.op.flat_block_ids
            blocks = torch.stack(
                [
                    torch.stack([layer.select(self._probe_axis, i).cpu() for i in ids])
                    for layer in self._probe_layers
                ]
            )
            number = next(self._probe_numbers)
            path = self._probe_folder / f"{number:05d}.pt"
            unfinished = path.with_suffix(".part")
            torch.save(
                {
                    "direction": direction,
                    "request_id": meta.request_id,
                    "token_ids": list(meta.op.token_ids),
                    "start": meta.op.start,
                    "end": meta.op.end,
                    "block_ids": list(ids),
                    "blocks": blocks,
                },
                unfinished,
            )
            unfinished.rename(path)
