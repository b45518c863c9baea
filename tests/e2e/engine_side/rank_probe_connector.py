# SPDX-License-Identifier: Apache-2.0
"""The probe of ``probe_connector`` for several workers: a folder for each rank."""

# Standard
from pathlib import Path
import os

# Third Party
from probe_connector import LMCacheMPConnector as ProbeConnector
import torch


class LMCacheMPConnector(ProbeConnector):
    """The probe, writing to ``KV_PROBE_FOLDER/rank<N>``."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Choose the folder; every worker is a process with settings of its own."""
        parallel = self._vllm_config.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        folder = Path(os.environ["KV_PROBE_FOLDER"]) / f"rank{rank}"
        folder.mkdir(parents=True)
        os.environ["KV_PROBE_FOLDER"] = str(folder)
        super().register_kv_caches(kv_caches)
