# SPDX-License-Identifier: Apache-2.0
"""What LMCache's futures do when they complete."""

# Standard
from typing import Any

# First Party
from lmcache.v1.multiprocess.futures import (
    DeviceMessagingFuture,
    MessagingFuture,
    when_done,
)


def test_what_is_done_when_all_have_completed() -> None:
    futures: list[MessagingFuture[Any]] = [MessagingFuture() for _ in range(3)]
    done: list[str] = []
    futures[1].set_result(None)
    when_done(futures, lambda: done.append("all"))
    when_done([], lambda: done.append("none"))
    futures[2].set_exception(TimeoutError())
    assert done == ["none"]
    futures[0].set_result(None)
    assert done == ["none", "all"]


def test_a_transfer_that_a_lost_server_drove_has_failed() -> None:
    """Not the engine, which asks for its result."""
    raw: MessagingFuture[Any] = MessagingFuture()
    transfer = DeviceMessagingFuture(raw, device="", event_backend=object())  # type: ignore[arg-type]
    assert not transfer.query()
    raw.set_exception(TimeoutError("the connection is lost"))
    assert transfer.query()
    assert transfer.result() is False
