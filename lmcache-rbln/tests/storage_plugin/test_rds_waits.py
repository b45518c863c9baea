# SPDX-License-Identifier: Apache-2.0
"""Waits for staging memory and for its locks have an end."""

# Standard
from types import SimpleNamespace
from typing import Any
import itertools

# Third Party
from interrupts import InterruptAt
from rds_support import MakeEngine
import pytest

# First Party
from lmcache_rbln.storage_plugin import rds_backend
from lmcache_rbln.storage_plugin.rds import memory, settings
from lmcache_rbln.storage_plugin.rds.threads import DaemonThreads


def test_no_setting_allows_ten_seconds() -> None:
    limits = {key: s.most for key, s in settings.SETTINGS.items() if "sec" in s.unit}
    assert limits == {"rds_wait_timeout": 9}
    assert rds_backend._CLOSE_TIMEOUT_S < 10


@pytest.mark.npu
def test_a_store_waits_once_whatever_its_number_of_chunks(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine({"rds_wait_timeout": 5})
    backend = one.backend
    obj = one.chunk(1)
    granted: list[float] = []
    clock = SimpleNamespace(now=100.0)
    # Not the module's own function, which threads need.
    monkeypatch.setattr(memory, "time", SimpleNamespace(monotonic=lambda: clock.now))

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
    monkeypatch.setattr(type(backend._store), "busy", True)
    failures = one.metric("staging_failures")
    assert [allocate(), allocate(), allocate()] == [obj, obj, None]
    assert granted == [5.0, 3.0, 1.0]
    assert one.metric("staging_failures") == failures + 1
    assert allocate() is obj
    assert granted[3:] == [5.0]  # LMCache went on with what it had
    backend.batched_submit_put_task([], [])
    assert allocate() is obj
    assert granted[4:] == [5.0]  # the next store
    clock.now += 60.0  # its chunks were given back: their gather failed
    assert allocate() is obj
    assert granted[5:] == [5.0]
    obj.ref_count_down()


# Of objects whose making was interrupted.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.npu
def test_an_interrupt_anywhere_leaves_others_going(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rds_backend, "_CLOSE_TIMEOUT_S", 0.0)
    one = engine({"rds_write_mode": "synchronous", "rds_buffer_size": 16})
    numbers = itertools.count()

    def store_and_restore() -> None:
        number = next(numbers)
        one.store(number)
        assert one.load(number) == [True]

    struck = 0
    files = ("rds/staging.py", "rds/store.py", "rds/restore.py")
    # In another thread: the one that was interrupted might have a lock still.
    others = DaemonThreads(1, "others")
    for line in itertools.count(1):
        if not InterruptAt(line, *files).strikes(store_and_restore):
            break
        struck += 1
        others.submit(store_and_restore).result(timeout=60)
    others.close(cancel=False)
    assert struck > 50
