# SPDX-License-Identifier: Apache-2.0
"""Threads that do not keep the process: what waits for an NVMe may wait for ever.

Python joins those of ``ThreadPoolExecutor`` when it ends, however long that takes.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any
import threading
import time


class DaemonThreads(Executor):
    """Runs calls in daemon threads, in the order in which they come.

    Args:
        threads: How many.
        name: Their names begin with it.
    """

    def __init__(self, threads: int, name: str) -> None:
        # A call and its future; ``None`` ends a thread.
        self._calls: SimpleQueue[tuple[Future, Callable[[], Any]] | None] = (
            SimpleQueue()
        )
        self._lock = threading.Lock()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}_{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """Queue a call; see ``Executor``.

        Raises:
            RuntimeError: They were shut down.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("no calls are taken after the end")
            self._calls.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; see ``Executor``."""
        with self._lock:
            self._closed = True
            while cancel_futures:
                try:
                    call = self._calls.get_nowait()
                except Empty:
                    break
                if call is not None:
                    call[0].cancel()
            for _ in self._threads:
                self._calls.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def join(self, seconds: float) -> bool:
        """Wait for the threads to end after :meth:`shutdown`.

        Args:
            seconds: Longest wait for all of them.

        Returns:
            Whether they have.
        """
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except BaseException as error:  # the future's, as in every executor
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            # What they hold is not kept until the next call.
            del call, future, function
