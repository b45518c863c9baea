# SPDX-License-Identifier: Apache-2.0
"""Threads that do not keep the process: what waits for an NVMe may wait for ever.

Python joins those of ``ThreadPoolExecutor`` when it ends, however long that takes.
"""

# Standard
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any
import threading
import time


class DaemonThreads:
    """Runs calls in daemon threads, in the order in which they come.

    Args:
        threads: How many.
        name: Their names begin with it.
    """

    def __init__(self, threads: int, name: str) -> None:
        # A future and its call; ``None`` ends a thread.
        self._calls: SimpleQueue[
            tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None
        ] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}_{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue a call.

        Raises:
            RuntimeError: They were closed.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("no calls are taken after the end")
            self._calls.put((future, call, args))
        return future

    def close(self, cancel: bool) -> None:
        """Take no more calls.

        Args:
            cancel: Whether calls that have not begun are cancelled.
        """
        with self._lock:
            self._closed = True
            while cancel:
                try:
                    queued = self._calls.get_nowait()
                except Empty:
                    break
                if queued is not None:
                    queued[0].cancel()
            for _ in self._threads:
                self._calls.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the threads to end, which they do behind :meth:`close`.

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
        while (queued := self._calls.get()) is not None:
            future, call, args = queued
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(*args))
                except BaseException as error:  # the future's, as in every executor
                    future.set_exception(error)
            # What they hold is not kept until the next call.
            del queued, future, call, args
