# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of the connector: requests, from their lookup to their end."""

# Future
from __future__ import annotations

# Standard
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
import itertools

# Third Party
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

# First Party
from lmcache_rbln._lmcache import LMCacheConnectorMetadata, LMCacheConnectorV1Dynamic
from lmcache_rbln.integration.vllm import private_names
from lmcache_rbln.integration.vllm.handover import RequestView, copied_step, view_of
from lmcache_rbln.integration.vllm.recovery import roll_back
from lmcache_rbln.settings import RECOMPUTE

if TYPE_CHECKING:
    # Third Party
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

#: Steps that vLLM may have scheduled when it learns of a load that failed, and more.
_STEPS_UNREPORTED = 4


@dataclass
class RBLNConnectorMetadata(LMCacheConnectorMetadata):
    """What the scheduler tells the workers for one step.

    Attributes:
        ended_requests: Requests whose lookups must hold nothing any more, whatever
            became of them.
        recovered_blocks: Blocks reported as not loaded, whose requests have been
            rolled back.
    """

    ended_requests: list[str] = field(default_factory=list)
    recovered_blocks: list[int] = field(default_factory=list)


class SchedulerSide(LMCacheConnectorV1Dynamic):
    """What vLLM's scheduler asks of the connector."""

    def begin_requests(self) -> None:
        """Begin without requests."""
        #: Requests until they end; ``None`` for one that LMCache does not see.
        self._views: dict[str, RequestView | None] = {}
        self._recovered_blocks: list[int] = []
        #: Blocks of the requests that ended in each of the last steps: a load that
        #: failed is reported behind the next step.
        self._given_up: deque[list[list[int]]] = deque([[]], maxlen=_STEPS_UNREPORTED)

    @property
    def _adapter(self) -> Any:
        return private_names.adapter_of(self)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Look a request up.

        Args:
            request: The request.
            num_computed_tokens: Its tokens that the NPU holds.

        Returns:
            Tokens to load beyond those, ``None`` if that is not known yet; and that
            the load is complete before the step.
        """
        view: Any = self._view(request)
        if view is None:
            return 0, False
        tokens, later = super().get_num_new_matched_tokens(view, num_computed_tokens)
        load = self._adapter.load_specs.get(request.request_id)
        if tokens and load is not None:
            # Under lmcache.max_tokens_per_load LMCache rounds what it loads down to
            # whole chunks, but not what it tells vLLM behind a cached prefix.
            tokens = min(tokens, load.lmcache_cached_tokens - load.vllm_cached_tokens)
        return tokens, later

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note that a request has its blocks.

        Args:
            request: The request.
            blocks: Its blocks.
            num_external_tokens: Tokens to load.
        """
        view: Any = self._view(request)
        if view is not None:
            super().update_state_after_alloc(view, blocks, num_external_tokens)

    def _view(self, request: Request) -> RequestView | None:
        request_id = request.request_id
        if request_id not in self._views:
            self._views[request_id] = view_of(request)
        return self._views[request_id]

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        """Build the metadata of one step.

        Args:
            scheduler_output: What the scheduler decided.

        Returns:
            What the workers load, store and release.
        """
        self._given_up.append([])
        self._count_loads_of_others()
        step = copied_step(scheduler_output, self._views)
        metadata = super().build_connector_meta(step)
        assert isinstance(metadata, LMCacheConnectorMetadata)
        ended = sorted(scheduler_output.finished_req_ids)
        recovered, self._recovered_blocks = self._recovered_blocks, []
        return RBLNConnectorMetadata(metadata.requests, ended, recovered)

    def _count_loads_of_others(self) -> None:
        """Count what another connector inside ``MultiConnector`` loads as vLLM's.

        Where that goes on behind a preemption, LMCache expects that nobody else loads,
        and ends the engine.
        """
        for request_id, load in self._adapter.load_specs.items():
            view: Any = self._views.get(request_id)
            if view is None or load.can_load:
                continue
            if (computed := view.num_computed_tokens) > load.vllm_cached_tokens:
                load.vllm_cached_tokens = computed
                load.lmcache_cached_tokens = min(load.lmcache_cached_tokens, computed)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the workers' report of one step.

        Args:
            connector_output: Names the blocks that could not be loaded.
        """
        invalid = connector_output.invalid_block_ids
        if not invalid:
            return
        transfer_config = self._vllm_config.kv_transfer_config
        assert transfer_config is not None
        views: dict[str, RequestView | None] = {}
        if transfer_config.kv_load_failure_policy == RECOMPUTE:
            views = self._views
        roll_back(
            {name: view.request for name, view in views.items() if view},
            private_names.allocated_blocks(self._adapter),
            itertools.chain.from_iterable(self._given_up),
            invalid,
            self._vllm_config.cache_config.block_size,
            getattr(self, "_kv_cache_manager", None),
        )
        self._recovered_blocks += invalid

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Note the end of a request.

        Args:
            request: The request.
            block_ids: Its blocks.

        Returns:
            Whether its blocks must be kept, and parameters for its answer.
        """
        request_id = request.request_id
        self._given_up[-1].append(list(block_ids))
        view: Any = self._views.pop(request_id, None)
        if view is None:
            return False, None
        adapter = self._adapter
        private_names.forget_priority(adapter, request_id)
        never_scheduled = adapter.load_specs.pop(request_id, None) is not None
        if never_scheduled and adapter.lookup_client is not None:
            adapter.lookup_client.clear_lookup_status(request_id)
        return super().request_finished(view, block_ids)
