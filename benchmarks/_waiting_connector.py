# SPDX-License-Identifier: Apache-2.0
"""LMCache's connector with restores on the engine's thread, as without a device's own.

Loaded by ``vllm serve`` through ``kv_connector_module_path``.
"""

# Standard
from typing import Any

# First Party
from lmcache.integration.vllm import lmcache_mp_connector as stock


class LMCacheMPConnector(stock.LMCacheMPConnector):
    """The connector, waiting for every load."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load, and return when all is loaded."""
        super().start_load_kv(forward_context, **kwargs)
        for future, _ in list(self.worker_adapter.retrieve_futures.values()):
            future.wait()
