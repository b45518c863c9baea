# SPDX-License-Identifier: Apache-2.0
"""``RBLNLMCacheConnectorV1``, which vllm-rbln registers under this module's path."""

# Future
from __future__ import annotations

# Standard
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
import itertools
import os
import threading
import weakref

# Third Party
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
)
import torch

# First Party
from lmcache import torch_device_type
from lmcache.integration.vllm.lmcache_connector_v1 import LMCacheConnectorV1Dynamic
from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorMetadata
from lmcache.logging import init_logger
from lmcache_rbln.integration.vllm import (
    combinations,
    refusal,
    service,
    startup_checks,
)
from lmcache_rbln.integration.vllm.handover import RequestView, copied_step, view_of
from lmcache_rbln.integration.vllm.recovery import UnloadedBlocks, roll_back
from lmcache_rbln.settings import RECOMPUTE, Settings, require, require_parsed
from lmcache_rbln.settings.masking import without_users

if TYPE_CHECKING:
    # Third Party
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    # First Party
    from lmcache_rbln.paged_kv import RBLNPagedKVConnector

logger = init_logger(__name__)

refusal.announce_in_front_process()

#: Steps that vLLM may have scheduled when it learns of a load that failed, and more.
_STEPS_UNREPORTED = 4

#: Connectors that have not been shut down.
_open: weakref.WeakSet[RBLNLMCacheConnectorV1] = weakref.WeakSet()


def _shut_down_open_connectors() -> None:
    for connector in list(_open):
        connector.shutdown()


# vLLM does not shut a connector down if start-up fails behind it, nor where a program
# ends with its LLM in use. This hook, which concurrent.futures is built on, runs in
# both, also in a forked process, while threads can still be started and joined; nothing
# public does.
threading._register_atexit(_shut_down_open_connectors)
# What a forked child inherits, its parent goes on with.
os.register_at_fork(after_in_child=_open.clear)


@dataclass
class RBLNConnectorMetadata(LMCacheConnectorMetadata):
    """What the scheduler tells the workers for one step.

    Attributes:
        dropped_lookups: Requests that ended before they were scheduled; what their
            lookup pinned is to be released.
        recovered_blocks: Blocks reported as not loaded, whose requests have been
            rolled back.
    """

    dropped_lookups: list[str] = field(default_factory=list)
    recovered_blocks: list[int] = field(default_factory=list)


class RBLNLMCacheConnectorV1(LMCacheConnectorV1Dynamic):
    """LMCache in vLLM's own processes, with KV on RBLN NPUs.

    Args:
        vllm_config: vLLM's configuration.
        role: Scheduler or worker.
        kv_cache_config: vLLM's plan of the KV cache.

    Raises:
        RuntimeError: If LMCache can't start and ``lmcache_rbln.allow_degraded`` is not
            set.
        ValueError: If a setting or the model is not supported.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        self._shutdown_once = threading.Lock()
        self._paged_kv: RBLNPagedKVConnector | None = None
        #: What LMCache has logged of tiers that it could not make.
        self._failures: list[str] = []
        try:
            self._start(vllm_config, role, kv_cache_config)
        except Exception as error:
            refusal.leave(error)
            self.shutdown()
            raise

    def _start(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None,
    ) -> None:
        transfer_config = vllm_config.kv_transfer_config
        assert transfer_config is not None
        extra_config = transfer_config.kv_connector_extra_config
        block_size = vllm_config.cache_config.block_size
        settings = require(os.environ, extra_config, block_size)
        startup_checks.require_supported(vllm_config, kv_cache_config)
        combinations.require_tested(vllm_config)
        config = service.engine_config(vllm_config)
        require_parsed(config, settings, block_size)
        self._settings = Settings.parse(config.extra_config, extra_config)
        #: Requests that ended between their lookup and their first step.
        self._dropped_lookups: list[str] = []
        self._recovered_blocks: list[int] = []
        #: Blocks of the requests that ended in each of the last steps: a load that
        #: failed is reported behind the next step.
        self._given_up: deque[list[list[int]]] = deque([[]], maxlen=_STEPS_UNREPORTED)
        #: Requests until they end; ``None`` for one that LMCache does not see.
        self._views: dict[str, RequestView | None] = {}
        self._unloaded = UnloadedBlocks(vllm_config.cache_config.block_size)
        _open.add(self)
        if role == KVConnectorRole.SCHEDULER:
            if self._settings.load_failure_policy == RECOMPUTE:
                # vLLM reads it from here once the scheduler has its connector.
                transfer_config.kv_load_failure_policy = "recompute"
        else:
            self._create_engine(config, vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        # Slot mappings are read on the host only.
        self._lmcache_engine.device = torch.device("cpu")
        self._require_healthy()

    def _create_engine(self, config: Any, vllm_config: VllmConfig) -> None:
        try:
            startup_checks.require_rbln(torch_device_type)
            self._paged_kv = service.create_engine(config, vllm_config)
        except Exception as error:
            if not self._settings.allow_degraded:
                raise
            self._warn_degraded(error)

    def _require_healthy(self) -> None:
        """Stop where LMCache would go on without a cache."""
        manager = self._lmcache_engine._manager
        problems = []
        if not manager.is_healthy():
            problems.append(startup_checks.exception_of(manager._init_failed_reason))
        engine = manager.lmcache_engine
        if engine is not None and engine.storage_manager is not None:
            sizes = zip(
                engine.metadata.get_shapes(), engine.metadata.get_dtypes(), strict=True
            )
            problems += startup_checks.missing_tiers(
                engine.config,
                engine.storage_manager.storage_backends,
                sum(shape.numel() * dtype.itemsize for shape, dtype in sizes),
            )
        if not problems:
            return
        problems += self._failures
        if self._settings.allow_degraded:
            self._warn_degraded("; ".join(problems))
            return
        reason = without_users("; ".join(problems))
        message = (
            f"LMCache could not start: {reason}. Fix that, or set "
            '"lmcache_rbln.allow_degraded": true in kv_connector_extra_config to serve '
            "without a cache"
        )
        logger.error("%s", message)
        raise RuntimeError(message)

    def _warn_degraded(self, reason: object) -> None:
        logger.warning(
            "LMCache could not start and lmcache_rbln.allow_degraded is set: serving "
            "without this cache, everything is recomputed. Reason: %s",
            without_users(str(reason)),
        )

    # ==============================
    # Worker-side methods
    # ==============================
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the KV cache, in place of an earlier one.

        Called once before warm-up, or after it where the KV cache is sized by then.

        Args:
            kv_caches: KV tensor by layer name, in the order of the layers.

        Raises:
            ValueError: If LMCache can't serve these tensors.
            RuntimeError: If LMCache's storage can't start.
        """
        try:
            self._register(kv_caches)
        except Exception as error:
            refusal.leave(error)
            self.shutdown()
            raise

    def _register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._paged_kv is not None:
            kv = self._paged_kv.register(list(kv_caches.values()))
            startup_checks.require_block_size(
                kv.block_size, self._vllm_config.cache_config.block_size
            )
            logger.info(
                "KV cache on %s: %d layers of %d blocks of %d tokens, %s, %s",
                kv.device,
                len(kv.layers),
                kv.num_blocks,
                kv.block_size,
                kv.dtype,
                kv.kv_format,
            )
        kv_caches = dict(kv_caches)
        if self._lmcache_engine.kv_caches:
            self._lmcache_engine.kv_caches = kv_caches
            return
        with service.logged_failures() as self._failures:
            super().register_kv_caches(kv_caches)
        self._require_healthy()

    def shutdown(self) -> None:
        """Stop LMCache; a second call does nothing."""
        if not self._shutdown_once.acquire(blocking=False):
            return
        _open.discard(self)
        # Neither is there where the start was refused.
        if hasattr(self, "_lmcache_engine"):
            super().shutdown()
        if self._paged_kv is not None:
            service.destroy_engine()

    def finalize_kv_cache_registration(self) -> None:
        """Confirm the registration once warm-up has run.

        vllm-rbln does not call this where warm-up is skipped, so nothing depends on it.

        Raises:
            RuntimeError: If no KV cache was registered.
        """
        if not self._lmcache_engine.kv_caches:
            raise RuntimeError("the KV cache was finalized but never registered")
        logger.info("KV cache registration is final")

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Load what LMCache holds of this step's requests; complete on return.

        Args:
            forward_context: vLLM's forward context.
            kwargs: Passed on.
        """
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RBLNConnectorMetadata)
        engine = self._lmcache_engine.lmcache_engine
        if engine is not None:
            for request_id in metadata.dropped_lookups:
                engine.lookup_unpin(request_id)
        self._unloaded.clear(metadata.recovered_blocks)
        super().start_load_kv(forward_context, **kwargs)
        self._unloaded.add(self._lmcache_engine._invalid_block_ids)

    def wait_for_save(self) -> None:
        """Store this step's chunks, except those that a failed load spoilt."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RBLNConnectorMetadata)
        engine = self._lmcache_engine.lmcache_engine
        sound = []
        for request in metadata.requests:
            if engine is None or not self._unloaded.touches(request):
                sound.append(request)
                continue
            logger.warning(
                "[req_id=%s] KV not stored: it was computed on KV that could not be "
                "loaded, and will be computed again",
                request.req_id,
            )
            engine.lookup_unpin(request.req_id)
        metadata.requests = sound
        super().wait_for_save()

    # ==============================
    # Scheduler-side methods
    # ==============================
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
        load = self._lmcache_engine.load_specs.get(request.request_id)
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
        step = copied_step(scheduler_output, self._views)
        metadata = super().build_connector_meta(step)
        assert isinstance(metadata, LMCacheConnectorMetadata)
        dropped, self._dropped_lookups = self._dropped_lookups, []
        recovered, self._recovered_blocks = self._recovered_blocks, []
        return RBLNConnectorMetadata(metadata.requests, dropped, recovered)

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
        trackers = self._lmcache_engine._request_trackers
        roll_back(
            {name: view.request for name, view in views.items() if view},
            {name: t.allocated_block_ids for name, t in trackers.items()},
            itertools.chain.from_iterable(self._given_up),
            invalid,
            self._lmcache_engine._block_size,
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
        self._lmcache_engine._requests_priority.pop(request_id, None)
        if self._lmcache_engine.load_specs.pop(request_id, None) is not None:
            # Looked up but never scheduled: no step will release its pins.
            if self._lmcache_engine.lookup_client is not None:
                self._lmcache_engine.lookup_client.clear_lookup_status(request_id)
            self._dropped_lookups.append(request_id)
        return super().request_finished(view, block_ids)
