# SPDX-License-Identifier: Apache-2.0
"""A client that hangs up while its request is loaded ends no engine."""

# Future
from __future__ import annotations

# Standard
from types import SimpleNamespace
from typing import Any

# Third Party
import pytest

LOADED, OTHER = "aborted while it was loaded", "another that has ended"


def test_a_request_is_freed_once() -> None:
    """vLLM's own scheduler takes the reports of two steps."""
    connectors = pytest.importorskip("lmcache.integration.vllm.lmcache_mp_connector")
    scheduling = pytest.importorskip("vllm.v1.core.sched.scheduler")
    outputs = pytest.importorskip("vllm.v1.outputs")
    status = pytest.importorskip("vllm.v1.request").RequestStatus.FINISHED_ABORTED

    connector = connectors.LMCacheMPConnector.__new__(connectors.LMCacheMPConnector)
    vars(connector).update(
        request_trackers={},
        lazy_offload=False,
        _can_store=True,
        _kv_cache_events=[],
        _ended_in_load=set(),
    )
    requests: dict[str, Any] = {
        name: SimpleNamespace(request_id=name, status=status, is_finished=lambda: True)
        for name in (LOADED, OTHER)
    }
    freed: list[str] = []
    scheduler = scheduling.Scheduler.__new__(scheduling.Scheduler)
    vars(scheduler).update(
        connector=connector,
        requests=requests,
        _free_request_blocks=lambda request: freed.append(request.request_id),
    )

    output = outputs.KVConnectorOutput
    scheduler._update_from_kv_xfer_finished(output(finished_recving={LOADED}))
    assert freed == [LOADED]
    scheduler._update_from_kv_xfer_finished(output(finished_sending={LOADED, OTHER}))
    assert freed == [LOADED, OTHER]
    assert not requests and not connector._ended_in_load
