# SPDX-License-Identifier: Apache-2.0
"""The worker's transfers, with restores beside the engine as stores are.

LMCache's asynchronous context stores on threads of its own, and restores on the
engine's. Here the engine's thread only submits both.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
import weakref

# Third Party
import torch

# First Party
from lmcache.logging import init_logger
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transfer_context.async_engine_driven import (
    AsyncEngineDrivenTransferContext,
)
from lmcache.v1.multiprocess.transfer_context.base import (
    scatter_cpu_to_paged_kv,
)
from lmcache.v1.multiprocess.transfer_context.worker_transfer import IPCEvent
from lmcache.v1.multiprocess.transport.base import RequestClient
from lmcache.v1.platform.devices.rbln.block_transfer import StillInFlightError
from lmcache.v1.platform.devices.rbln.lanes import torch_rbln
from lmcache.v1.platform.devices.rbln.lmcache_release import (
    groups_of,
    prepare_retrieve,
    several_groups,
    window_of,
)
from lmcache.v1.platform.devices.rbln.staging import arena
from lmcache.v1.platform.devices.rbln.transfers import (
    BlocksWritten,
    GivenUp,
    Restore,
    Server,
    Store,
)

logger = init_logger(__name__)

#: Restores of a worker at a time: while one waits for the server, others copy.
RESTORE_THREADS = 4


class _Event:
    """An event of the engine's stream that transfers wait for on the host.

    A transfer that waits for it on the device has a lease of staging meanwhile, and
    keeps out others whose turn has come.
    """

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self, _stream: Any = None) -> None:
        """Return when the event has happened, so that every stream is behind it.

        Raises:
            RuntimeError: If what it is behind failed. The engine is told of that too.
        """
        self._event.synchronize()


class RblnTransferContext(AsyncEngineDrivenTransferContext):
    """LMCache's asynchronous context, with asynchronous restores.

    Args:
        instance_id: The worker's number.
        req_client: Client of the server.
    """

    def __init__(self, instance_id: int, req_client: RequestClient) -> None:
        super().__init__(instance_id, req_client)
        self._restore_executor = ThreadPoolExecutor(
            RESTORE_THREADS, thread_name_prefix="lmcache_rbln_restore"
        )
        self._restores: set[Restore] = set()
        self._stores: weakref.WeakSet[Store] = weakref.WeakSet()

    def register(self, *args: Any, **kwargs: Any) -> None:
        """Register with the server, as LMCache's context; see there."""
        super().register(*args, **kwargs)
        if self._engine_driven_context is not None:
            server: Any = Server(self._req_client)
            self._engine_driven_context.req_client = server

    def create_recorded_event(self) -> IPCEvent:
        """Return an event behind all that this thread has submitted on its stream."""
        return _Event(super().create_recorded_event())

    def submit_store(
        self,
        _request_id: str,
        key: Any,
        kv_caches: dict[str, torch.Tensor],
        block_ids: list[list[int]],
        _event: IPCEvent | None,
        blocks_in_chunk: int,
    ) -> MessagingFuture[bool]:
        """Submit a store, as LMCache's context does; see there. It can be given up."""
        # Its keys are transfers, see Server.
        context: Any = self.engine_driven_context
        # None is where the server was not there when the event was asked for.
        behind = _event or self.create_recorded_event()
        store = Store(
            key, behind, lambda store: context.abort_store(store, self._instance_id)
        )
        with self._inflight_lock:
            self._stores.add(store)
        store.follow(
            super().submit_store(
                _request_id,
                store,
                kv_caches,
                block_ids,
                BlocksWritten(store),
                blocks_in_chunk,
            )
        )
        groups = several_groups(self)
        if groups and groups.have_windows:
            # vLLM frees blocks that a window has passed without waiting for stores.
            self.flush_inflight_stores()
        return store

    def _null_chunk_indices(self, block_ids: list[list[int]]) -> list[list[int]]:
        """Return the chunks of each group that LMCache is not to store."""
        groups = several_groups(self)
        return groups.not_to_store(block_ids) if groups else [[] for _ in block_ids]

    def _release_staging(self, chunks: list[torch.Tensor]) -> None:
        """Keep chunks for later stores, unless copies may still write to them."""
        if not arena().in_use()[1]:
            super()._release_staging(chunks)

    def submit_retrieve(
        self,
        _request_id: str,
        key: Any,
        kv_caches: dict[str, torch.Tensor],
        block_ids: list[list[int]],
        event: IPCEvent | None,
        blocks_in_chunk: int,
        skip_first_n_tokens: int = 0,
    ) -> Restore:
        """Submit a restore, and return at once.

        Args:
            _request_id: Name of the request.
            key: What to restore.
            kv_caches: KV cache by layer name.
            block_ids: Blocks to write, of each group.
            event: Blocks are written after it; None is all that this thread has
                submitted so far.
            blocks_in_chunk: Blocks of a chunk.
            skip_first_n_tokens: Leading tokens that are not written.

        Returns:
            Whether the bytes are in the blocks. It is known when the server has its
            chunks back.

        Raises:
            RuntimeError: The context is not registered.
        """
        context = self.engine_driven_context
        behind = event or self.create_recorded_event()
        groups = groups_of(self, kv_caches, blocks_in_chunk)
        restore = Restore(key)

        def scatter() -> bool:
            parts = groups.to_restore(block_ids, skip_first_n_tokens)
            chunks = prepare_retrieve(context, restore, self._instance_id, parts)
            if chunks is None:
                return False
            behind.wait()
            restore.begin()
            try:
                # A transfer is behind the current stream, and nothing is queued on this
                # one: on the engine's it would wait for forwards that came later.
                with torch_rbln().stream(self._copy_stream):
                    for part, held in zip(parts, chunks, strict=True):
                        group = part.group
                        scatter_cpu_to_paged_kv(
                            {name: kv_caches[name] for name in group.layer_names},
                            part.block_ids,
                            held,
                            group.blocks_in_chunk,
                            skip_first_n_tokens=part.skip_tokens,
                            layout_hints=self._layout_hints,
                            engine_kv_format=group.engine_kv_format,
                            engine_type=self._engine_type,
                            **window_of(group),
                        )
            except StillInFlightError:
                # Neither reported nor given up: nobody else gets the blocks.
                logger.error(
                    "A restore stays unfinished and keeps its blocks, which the device "
                    "may still write: restart the worker"
                )
                raise
            except BaseException:
                restore.end()
                raise
            restore.end()
            return True

        with self._inflight_lock:
            if self._is_closing:
                restore.abandon()
                return restore
            self._restores.add(restore)
            self._restore_executor.submit(self._run, restore, context, scatter)
        return restore

    def _run(
        self,
        restore: Restore,
        context: Any,
        scatter: Callable[[], bool],
    ) -> None:
        """Run a restore to its end; whatever fails, the server gets its chunks back."""
        ok = asked = False
        try:
            try:
                asked = not restore.query()
                ok = asked and scatter()
            except GivenUp:
                logger.warning("A restore was given up: its server is lost")
            except Exception:
                logger.exception("Failed to restore chunks")
            if not context.commit_retrieve(restore, self._instance_id):
                logger.error("The server did not take restored chunks back in time")
        except GivenUp:
            # A lookup has locked its chunks, and requests are handled in order.
            if not asked:
                self._req_client.prepare_retrieve(restore.key, self._instance_id)
            self._req_client.commit_retrieve(restore.key, self._instance_id)
        except Exception:
            logger.exception("Failed to give restored chunks back")
        finally:
            with self._inflight_lock:
                self._restores.discard(restore)
            restore.set_result(ok)

    def _drain(self) -> None:
        """Accept nothing more, give restores up, and wait for what is under way."""
        with self._inflight_lock:
            self._is_closing = True
            restores = list(self._restores)
        for restore in restores:
            restore.abandon()
        self._restore_executor.shutdown()
        super()._drain()

    def give_up(self) -> None:
        """Give everything up, as the server is lost, and close what it had shared.

        Returns when nothing reads or writes blocks any more; the server is not waited
        for.
        """
        with self._inflight_lock:
            self._is_closing = True
            stores = list(self._stores)
        for store in stores:
            store.abandon()
        self._drain()
        if self._engine_driven_context is not None:
            self._engine_driven_context.close()
