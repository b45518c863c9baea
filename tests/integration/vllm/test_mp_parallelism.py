# SPDX-License-Identifier: Apache-2.0
"""``LMCacheMPConnector`` serves no engine whose blocks are spread over devices."""

# Future
from __future__ import annotations

# Standard
from types import SimpleNamespace
from typing import Any

# Third Party
import pytest


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_context_parallelism_is_refused(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connectors = pytest.importorskip("lmcache.integration.vllm.lmcache_mp_connector")
    monkeypatch.setattr(connectors, "torch_device_type", "rbln")
    sizes = {f"{phase}_context_parallel_size": 2}
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(**sizes))
    with pytest.raises(ValueError, match=f"--{phase}-context-parallel-size 1"):
        connectors.validate_dcp_support(config, 1)
