# SPDX-License-Identifier: Apache-2.0
"""The private names of LMCache that the connector needs, all of them.

They have no public counterpart in LMCache 0.5.6; ``test_interface.py`` looks for
each in the installed one, and for others in the rest of the package.
"""

# Future
from __future__ import annotations

# Standard
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # First Party
    from lmcache_rbln._lmcache import LMCacheConnectorV1Dynamic


def adapter_of(connector: LMCacheConnectorV1Dynamic) -> Any:
    """Return what does a connector's work; ``None`` where its start was refused."""
    return getattr(connector, "_lmcache_engine", None)


def start_failure(adapter: Any) -> str | None:
    """Return the traceback of a start that failed; ``None`` if all is well."""
    manager = adapter._manager
    return None if manager.is_healthy() else manager._init_failed_reason


def allocated_blocks(adapter: Any) -> dict[str, list[int]]:
    """Return the blocks of each request in the order of its tokens, by its id.

    Also those that vLLM took away when it preempted the request.
    """
    trackers = adapter._request_trackers
    return {name: tracker.allocated_block_ids for name, tracker in trackers.items()}


def forget_priority(adapter: Any, request_id: str) -> None:
    """Let go of the priority of a request that was never scheduled."""
    adapter._requests_priority.pop(request_id, None)
