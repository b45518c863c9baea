# SPDX-License-Identifier: Apache-2.0
"""Threads of direct storage run calls in order, and never keep the process."""

# Standard
import subprocess
import sys
import threading

# Third Party
from rds_support import MakeEngine
import pytest

# First Party
from lmcache_rbln.storage_plugin.rds.threads import DaemonThreads

HANGS = """
import threading
from lmcache_rbln.storage_plugin.rds.threads import DaemonThreads

threads, begun = DaemonThreads(1, "hangs"), threading.Event()

def call():
    begun.set()
    threading.Event().wait()

threads.submit(call)
begun.wait()
threads.close(cancel=True)
"""


def test_a_call_that_hangs_does_not_keep_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], timeout=300)
    assert ended.returncode == 0


@pytest.mark.npu
def test_all_threads_of_a_backend_are_such(engine: MakeEngine) -> None:
    one = engine({"rds_write_mode": "overlapped"})
    one.store(0)
    found = [t for t in threading.enumerate() if t.name.startswith("rds-")]
    assert {thread.name.rpartition("_")[0] for thread in found} == {
        "rds-checksum",
        "rds-reader",
        "rds-writer",
    }
    assert all(thread.daemon for thread in found)


def test_results_errors_and_the_end() -> None:
    threads = DaemonThreads(1, "few")
    order: list[int] = []
    futures = [threads.submit(order.append, number) for number in range(50)]
    failed = threads.submit(int, "no number")
    assert isinstance(failed.exception(timeout=60), ValueError)
    assert threads.submit(sum, [1, 2], 3).result(timeout=60) == 6
    assert order == list(range(50)) and all(future.done() for future in futures)
    gate, begun = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        gate.wait(60)

    running = threads.submit(wait)
    queued = threads.submit(order.append, 50)
    assert begun.wait(60)
    threads.close(cancel=True)
    assert queued.cancelled() and not running.done()
    assert not threads.join(0)
    gate.set()
    assert threads.join(60)
    assert running.done() and 50 not in order
    with pytest.raises(RuntimeError, match="after the end"):
        threads.submit(int)


def test_what_is_queued_at_the_end_runs_where_it_is_not_cancelled() -> None:
    threads = DaemonThreads(2, "few")
    futures = [threads.submit(int, "7") for _ in range(20)]
    threads.close(cancel=False)
    assert threads.join(60)
    assert [future.result(timeout=0) for future in futures] == [7] * 20
