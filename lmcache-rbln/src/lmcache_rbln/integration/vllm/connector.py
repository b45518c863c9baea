# SPDX-License-Identifier: Apache-2.0
"""``RBLNLMCacheConnectorV1``, which vllm-rbln registers under this module's path."""

# Future
from __future__ import annotations

# Standard
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec
import functools
import os
import threading
import weakref

# Third Party
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
import torch

# First Party
from lmcache import torch_device_type
from lmcache.integration.vllm import front_process
from lmcache.logging import init_logger
from lmcache_rbln.integration.vllm import combinations, service, startup_checks
from lmcache_rbln.integration.vllm.recovery import UnloadedBlocks
from lmcache_rbln.integration.vllm.requests import RBLNConnectorMetadata, SchedulerSide
from lmcache_rbln.settings import RECOMPUTE, Settings, require, require_parsed
from lmcache_rbln.settings.masking import without_users

if TYPE_CHECKING:
    # Third Party
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig

    # First Party
    from lmcache_rbln.paged_kv import RBLNPagedKVConnector

logger = init_logger(__name__)

front_process.announce()

_Arguments = ParamSpec("_Arguments")
#: Requests whose end a worker remembers, for lookups that are later still.
ENDED_REQUESTS = 256
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


def _starts(
    step: Callable[Concatenate[RBLNLMCacheConnectorV1, _Arguments], None],
) -> Callable[Concatenate[RBLNLMCacheConnectorV1, _Arguments], None]:
    """Let a step of the start that fails leave its reason, and end what it began."""

    @functools.wraps(step)
    def run(
        connector: RBLNLMCacheConnectorV1,
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> None:
        try:
            front_process.leaves_reason(step)(connector, *args, **kwargs)
        except Exception:
            connector.shutdown()
            raise

    return run


class RBLNLMCacheConnectorV1(SchedulerSide):
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

    @_starts
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
        self.begin_requests()
        self._unloaded = UnloadedBlocks(vllm_config.cache_config.block_size)
        #: Those of them that vLLM has not been told of.
        self._unreported: set[int] = set()
        #: The last requests that ended.
        self._ended: deque[str] = deque(maxlen=ENDED_REQUESTS)
        _open.add(self)
        front_process.leave_sockets(service.socket_paths(config, vllm_config))
        if role == KVConnectorRole.SCHEDULER:
            if self._settings.load_failure_policy == RECOMPUTE:
                # vLLM reads it from here once the scheduler has its connector.
                transfer_config.kv_load_failure_policy = "recompute"
        else:
            self._create_engine(config, vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        # Slot mappings are read on the host only.
        self._adapter.device = torch.device("cpu")
        self._require_healthy()
        if role == KVConnectorRole.SCHEDULER:  # made last
            front_process.forget_reason()

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
        problems = service.start_problems(self._adapter)
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

    # ---- worker ---------------------------------------------------------------------

    @_starts
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the KV cache, in place of an earlier one.

        Called once before warm-up, or after it where the KV cache is sized by then.

        Args:
            kv_caches: KV tensor by layer name, in the order of the layers.

        Raises:
            ValueError: If LMCache can't serve these tensors.
            RuntimeError: If LMCache's storage can't start.
        """
        if self._paged_kv is not None:
            kv = self._paged_kv.register(list(kv_caches.values()))
            startup_checks.require_block_size(
                kv.desc.bs, self._vllm_config.cache_config.block_size
            )
            logger.info(
                "KV cache on %s: %d layers of %d blocks of %d tokens, %s, %s",
                kv.device,
                len(kv.layers),
                kv.desc.nb,
                kv.desc.bs,
                kv.dtype,
                kv.kv_format,
            )
        kv_caches = dict(kv_caches)
        if self._adapter.kv_caches:
            self._adapter.kv_caches = kv_caches
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
        if self._adapter is not None:
            super().shutdown()
        if self._paged_kv is not None:
            service.destroy_engine()

    def finalize_kv_cache_registration(self) -> None:
        """Confirm the registration once warm-up has run.

        vllm-rbln does not call this where warm-up is skipped, so nothing depends on it.

        Raises:
            RuntimeError: If no KV cache was registered.
        """
        if not self._adapter.kv_caches:
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
        engine = self._adapter.lmcache_engine
        if engine is not None:
            self._ended.extend(metadata.ended_requests)
            # A lookup that timed out may come to its end behind its request.
            late = [name for name in list(engine.lookup_pins) if name in self._ended]
            for request_id in {*metadata.ended_requests, *late}:
                engine.lookup_unpin(request_id)
        self._unloaded.clear(metadata.recovered_blocks)
        super().start_load_kv(forward_context, **kwargs)
        unloaded = super().get_block_ids_with_load_errors()
        self._unreported |= unloaded
        self._unloaded.add(unloaded)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded since the last call."""
        unloaded, self._unreported = self._unreported, set()
        return unloaded

    def wait_for_save(self) -> None:
        """Store this step's chunks, except those that a failed load spoilt."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RBLNConnectorMetadata)
        engine = self._adapter.lmcache_engine
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
