# SPDX-License-Identifier: Apache-2.0
"""Transfers of the worker that can be given up when the server is lost."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable
from typing import Any
import sys
import threading

# First Party
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transfer_context.shm import ABORT_STORE
from lmcache.v1.multiprocess.transport.base import RequestClient
from lmcache.v1.platform.devices.rbln.block_transfer import StillInFlightError


class GivenUp(RuntimeError):
    """The transfer is to touch no blocks and to ask no server any more."""

    def __init__(self) -> None:
        super().__init__("The transfer was given up: its server is lost")


class Transfer(MessagingFuture[bool]):
    """The result of a transfer. It can be given up, but not while it copies.

    Args:
        key: What is transferred.
    """

    def __init__(self, key: Any) -> None:
        super().__init__()
        self.key = key
        # For what a server logs and raises.
        self.request_id = getattr(key, "request_id", None)
        self._lock = threading.Lock()
        self._copies = False
        self._given_up = False
        self._awaited: MessagingFuture[Any] | None = None

    def begin(self) -> None:
        """Claim the blocks.

        Raises:
            GivenUp: If the transfer was given up.
        """
        with self._lock:
            if self._given_up:
                raise GivenUp
            self._copies = True

    def end(self) -> None:
        """Release the blocks: no copy reads or writes them any more."""
        with self._lock:
            self._copies = False
            if self._given_up:
                self._fail()

    def abandon(self) -> bool:
        """Give up: the transfer fails, at once or when its copies have ended.

        Returns:
            Whether nothing reads or writes the blocks any more.
        """
        with self._lock:
            if self.query():
                return True
            self._given_up = True
            if self._awaited is not None:
                # Whoever waits for the server goes on.
                self._awaited.set_exception(GivenUp())
            if not self._copies:
                self._fail()
            return not self._copies

    def ask(
        self, request: Callable[..., MessagingFuture[Any]], *args: Any
    ) -> MessagingFuture[Any]:
        """Send a request about the key, unless the transfer was given up.

        Returns:
            The answer, or GivenUp as soon as the transfer is given up.

        Raises:
            GivenUp: Nothing was sent.
        """
        with self._lock:
            if self._given_up:
                raise GivenUp
            self._awaited = request(self.key, *args)
            return self._awaited

    def _fail(self) -> None:
        """Set the result of a transfer that was given up. The lock is held."""
        if not self.query():
            super().set_result(False)


class Restore(Transfer):
    """The result of a restore."""

    def set_result(self, result: bool) -> None:
        """Set the result, unless giving up has, or copies may still write."""
        with self._lock:
            if not self._copies and not self.query():
                super().set_result(result)


class Store(Transfer):
    """The result of a store, whose copies are LMCache's.

    Args:
        key: What is stored.
        event: The blocks are read after it.
        abort: Tells the server to take its slots back unfilled.
    """

    def __init__(self, key: Any, event: Any, abort: Callable[[Store], None]) -> None:
        super().__init__(key)
        self._event = event
        self._abort = abort
        self._reserves = False
        self._completion: MessagingFuture[bool] | None = None

    def follow(self, completion: MessagingFuture[bool]) -> None:
        """End when LMCache's future does, or earlier when given up."""
        with self._lock:
            self._completion = completion
            self.is_done_ = completion.is_done_
            if self._given_up and not self._copies:
                self._fail()

    def result(self, timeout: float | None = None) -> bool:
        """Return whether everything is stored; what was given up is not.

        Raises:
            TimeoutError: If it is not known after ``timeout`` seconds.
        """
        done = super().result(timeout)
        if self._given_up or self._completion is None:
            return bool(done)
        return self._completion.result()

    def abandon(self) -> bool:
        """Give up, see :meth:`Transfer.abandon`; the server gets its slots back."""
        free = super().abandon()
        if free and self._given_up:
            # In order behind the request for them, whether that is answered or not.
            # While they are filled, LMCache does it when that has ended.
            self._abort(self)
        return free

    def prepare(
        self, client: RequestClient, instance_id: int, *more: Any
    ) -> MessagingFuture[Any]:
        """Ask the server for slots."""

        def request(key: Any) -> MessagingFuture[Any]:
            self._reserves = True
            return client.prepare_store(key, instance_id, *more)

        slots = self.ask(request)
        slots.add_done_callback(self._give_back_unseen)
        return slots

    def _give_back_unseen(self, slots: MessagingFuture[Any]) -> None:
        """Give slots back whose answer is lost: LMCache knows of none to give back."""
        if isinstance(slots.exception_, TimeoutError):
            self._abort(self)

    def commit(
        self, client: RequestClient, instance_id: int, data: bytes
    ) -> MessagingFuture[Any] | None:
        """Tell the server that slots are filled, or once that they never will be."""
        if data == ABORT_STORE:
            with self._lock:
                reserves, self._reserves = self._reserves, False
            # While copies may still write to the slots, nobody else gets them.
            if not reserves or isinstance(sys.exc_info()[1], StillInFlightError):
                return None
            return client.commit_store(self.key, instance_id, data)
        self.end()
        return self.ask(client.commit_store, instance_id, data)

    def wait_for_blocks(self, stream: Any = None) -> None:
        """Wait until the blocks are written, and claim them.

        Raises:
            GivenUp: If the store was given up.
        """
        self._event.wait(stream)
        self.begin()


class Server:
    """The client of a server to a context, whose keys are transfers.

    Args:
        client: Client of the server.
    """

    def __init__(self, client: RequestClient) -> None:
        self._client = client

    def prepare_store(
        self, store: Store, instance_id: int, *more: Any
    ) -> MessagingFuture[Any]:
        """Ask for the slots of a store."""
        return store.prepare(self._client, instance_id, *more)

    def commit_store(
        self, store: Store, instance_id: int, data: bytes
    ) -> MessagingFuture[Any] | None:
        """Publish the slots of a store, or give them back."""
        return store.commit(self._client, instance_id, data)

    def prepare_retrieve(
        self, restore: Restore, instance_id: int
    ) -> MessagingFuture[Any]:
        """Ask for the chunks of a restore."""
        return restore.ask(self._client.prepare_retrieve, instance_id)

    def commit_retrieve(
        self, restore: Restore, instance_id: int
    ) -> MessagingFuture[Any]:
        """Give the chunks of a restore back."""
        return restore.ask(self._client.commit_retrieve, instance_id)


class BlocksWritten:
    """The event that LMCache's store waits for, right before it reads blocks."""

    def __init__(self, store: Store) -> None:
        self.wait = store.wait_for_blocks
