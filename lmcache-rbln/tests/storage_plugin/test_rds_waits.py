# SPDX-License-Identifier: Apache-2.0
"""Waits for staging memory have an end, once per store: with a clock of the test's."""

# Standard
from types import SimpleNamespace
from typing import Any
import threading

# Third Party
from rds_support import MakeEngine
import pytest

# First Party
from lmcache_rbln.storage_plugin import rds_backend, rds_settings, rds_waits
from lmcache_rbln.storage_plugin.rds_waits import StoreWaits, deadline_in


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Obj:
    """A memory object."""

    valid = True

    def is_valid(self) -> bool:
        return self.valid


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    # Not the module's own function, which threads need.
    monkeypatch.setattr(rds_waits, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def test_no_setting_allows_ten_seconds() -> None:
    limits = {
        key: s.most for key, s in rds_settings.SETTINGS.items() if "sec" in s.unit
    }
    assert limits == {"rds_wait_timeout": 9}
    assert rds_backend._CLOSE_TIMEOUT_S < 10


def test_a_deadline(clock: Clock) -> None:
    left = deadline_in(5.0)
    assert left() == 5.0
    clock.now += 4.0
    assert left() == 1.0
    clock.now += 2.0
    assert left() == -1.0


def test_the_waits_of_a_store_share_its_time(clock: Clock) -> None:
    waits = StoreWaits(5.0)
    obj: Any = Obj()
    first = waits.left()
    clock.now += 3.0
    waits.waited(first, obj)
    clock.now += 60.0  # not a wait
    second = waits.left()
    assert second() == 2.0
    clock.now += 4.0
    waits.waited(second, obj)
    assert waits.left()() == 0.0

    other: list[float] = []
    thread = threading.Thread(target=lambda: other.append(waits.left()()))
    thread.start()
    thread.join(timeout=10)
    assert other == [5.0]  # another thread's store

    waits.end()
    assert waits.left()() == 5.0


@pytest.mark.parametrize("how", ["given back", "lost"])
def test_a_store_that_was_never_handed_over_costs_the_next_one_no_time(
    clock: Clock, how: str
) -> None:
    """Its gather failed: LMCache gives the chunks back and stores nothing."""
    waits = StoreWaits(5.0)
    objs: list[Any] = [Obj()]
    first = waits.left()
    clock.now += 4.0
    waits.waited(first, objs[0])
    assert waits.left()() == 1.0
    if how == "lost":
        objs.clear()
    else:
        objs[0].valid = False
    assert waits.left()() == 5.0


@pytest.mark.npu
def test_a_store_waits_once_whatever_its_number_of_chunks(
    engine: MakeEngine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine({"rds_wait_timeout": 5})
    backend = one.backend
    obj = one.chunk(1)
    granted: list[float] = []

    def slow(shapes: Any, dtypes: Any, fmt: Any, left: Any) -> Any:
        """Memory that comes back two seconds after it is asked for."""
        granted.append(left())
        clock.now += min(left(), 2.0)
        return obj if left() > 0 else None

    def allocate() -> Any:
        return backend.allocate(
            one.metadata.get_shapes(), one.metadata.get_dtypes(), None
        )

    monkeypatch.setattr(backend._allocator, "allocate_within", slow)
    assert allocate() is None
    assert granted == [0.0]  # nothing is being written: no use to wait
    granted.clear()
    monkeypatch.setattr(type(backend._writer), "busy", True)
    failures = one.metric("staging_failures")
    assert [allocate(), allocate(), allocate()] == [obj, obj, None]
    assert granted == [5.0, 3.0, 1.0]
    assert one.metric("staging_failures") == failures + 1
    assert allocate() is obj
    assert granted[3:] == [5.0]  # LMCache went on with what it had
    backend.batched_submit_put_task([], [])
    assert allocate() is obj
    assert granted[4:] == [5.0]  # the next store
    obj.ref_count_down()
