# SPDX-License-Identifier: Apache-2.0
"""The worker's transfers, with restores beside the engine as stores are.

LMCache's asynchronous context stores on threads of its own, and restores on the
engine's. Here the engine's thread only submits both.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
import functools
import threading

# Third Party
import torch

# First Party
from lmcache.logging import init_logger
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transfer_context.async_engine_driven import (
    AsyncEngineDrivenTransferContext,
)
from lmcache.v1.multiprocess.transfer_context.base import (
    EngineDrivenContext,
    scatter_cpu_to_paged_kv,
)
from lmcache.v1.multiprocess.transfer_context.worker_transfer import (
    IPCEvent,
    _get_kv_device,
    _single_group_block_ids,
)
from lmcache.v1.multiprocess.transport.base import RequestClient
from lmcache.v1.platform.devices.rbln.block_transfer import StillInFlightError
from lmcache.v1.platform.devices.rbln.lmcache_release import prepare_retrieve
from lmcache.v1.platform.devices.rbln.staging import torch_rbln

logger = init_logger(__name__)

#: Restores of a worker at a time: while one waits for the server, others copy.
RESTORE_THREADS = 4
#: Seconds that a server gets to hear of a restore that was given up before it began.
_GIVE_UP_S = 1.0


class Restore(MessagingFuture[bool]):
    """The result of a restore. It can be given up, but not while it writes."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._writes = False
        self._given_up = False

    def begin_writing(self) -> bool:
        """Claim the blocks; returns False if the restore was given up."""
        with self._lock:
            self._writes = not self._given_up
            return self._writes

    def end_writing(self) -> None:
        """Release the blocks: no copy writes to them any more."""
        with self._lock:
            self._writes = False
            if self._given_up:
                super().set_result(False)

    def abandon(self) -> bool:
        """Give up: the restore fails, at once or when it has ended to write.

        Returns:
            Whether nothing writes to the blocks any more.
        """
        with self._lock:
            self._given_up = True
            if not self._writes and not self.query():
                super().set_result(False)
            return not self._writes

    def set_result(self, result: bool) -> None:
        """Set the result, unless giving up has, or copies may still write."""
        with self._lock:
            if not self._writes and not self.query():
                super().set_result(result)


@functools.cache
def _idle_streams(device: torch.device | int) -> list[Any]:
    """Return the process's streams of a device with nothing to do, to take and lay."""
    return []


@contextmanager
def _idle_stream(device: torch.device | int) -> Iterator[Any]:
    """Lend a stream on which nothing is queued, to the caller alone."""
    idle = _idle_streams(device)
    try:
        stream = idle.pop()
    except IndexError:
        stream = torch_rbln().Stream(device)
    yield stream
    # Where it failed it may not be idle.
    idle.append(stream)


class _Event:
    """An event of the engine's stream that transfers wait for on the host.

    A transfer that waits for it on the device has a lease of staging meanwhile, and
    keeps out others whose turn has come.
    """

    def __init__(self, event: Any) -> None:
        self._event = event
        self._device = torch_rbln().current_device()

    def wait(self, stream: Any = None) -> None:
        """Return when the event has happened, so that every stream is behind it.

        Raises:
            RuntimeError: If what it is behind failed.
        """
        # Not on the engine's stream, whose failures are for the engine to be told of.
        with _idle_stream(self._device) as waiting:
            self._event.wait(waiting)
            waiting.synchronize()


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

    def create_recorded_event(self) -> IPCEvent:
        """Return an event behind all that this thread has submitted on its stream."""
        return _Event(super().create_recorded_event())

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
            block_ids: Blocks to write, of the only group.
            event: Blocks are written after it; None is all that this thread has
                submitted so far.
            blocks_in_chunk: Blocks of a chunk.
            skip_first_n_tokens: Leading tokens that are not written.

        Returns:
            Whether the bytes are in the blocks. It is known when the server has its
            chunks back.

        Raises:
            RuntimeError: The context is not registered, or there are several groups.
        """
        context = self.engine_driven_context
        behind = event or self.create_recorded_event()
        blocks = _single_group_block_ids(block_ids)
        restore = Restore()

        def scatter() -> bool:
            expected = len(blocks) // blocks_in_chunk
            chunks = prepare_retrieve(context, key, self._instance_id, expected)
            # One that lacks chunks is a miss.
            if chunks is None or len(chunks) != expected:
                return False
            behind.wait()
            if not restore.begin_writing():
                return False
            try:
                with (
                    _idle_stream(_get_kv_device(kv_caches)) as stream,
                    torch_rbln().stream(stream),
                ):
                    scatter_cpu_to_paged_kv(
                        kv_caches,
                        blocks,
                        chunks,
                        blocks_in_chunk,
                        skip_first_n_tokens=skip_first_n_tokens,
                        layout_hints=self._layout_hints,
                        engine_kv_format=self._engine_kv_format,
                        engine_type=self._engine_type,
                    )
            except StillInFlightError:
                # Neither reported nor given up: nobody else gets the blocks.
                logger.error(
                    "A restore stays unfinished and keeps its blocks, which the device "
                    "may still write: restart the worker"
                )
                raise
            except BaseException:
                restore.end_writing()
                raise
            restore.end_writing()
            return True

        with self._inflight_lock:
            if self._is_closing:
                restore.abandon()
                return restore
            self._restores.add(restore)
            self._restore_executor.submit(self._run, restore, context, key, scatter)
        return restore

    def _run(
        self,
        restore: Restore,
        context: EngineDrivenContext,
        key: Any,
        scatter: Callable[[], bool],
    ) -> None:
        """Run a restore to its end; whatever fails, the server gets its chunks back."""
        ok = False
        try:
            if restore.query():
                # Given up. A lookup has locked its chunks; the server may be gone.
                self._req_client.prepare_retrieve(key, self._instance_id)
                self._req_client.commit_retrieve(key, self._instance_id).wait(
                    _GIVE_UP_S
                )
                return
            try:
                ok = scatter()
            except Exception:
                logger.exception("Failed to restore chunks")
            if not context.commit_retrieve(key, self._instance_id):
                logger.error("The server did not take restored chunks back in time")
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
