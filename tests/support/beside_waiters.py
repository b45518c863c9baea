# SPDX-License-Identifier: Apache-2.0
"""Threads that move KV while copies fail, beside others that wait for the device."""

# Standard
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
import threading

# Third Party
import torch

rbln: Any = torch.rbln


def run_beside_waiters(
    stream: Any, works: Iterable[Callable[[Counter[str]], None]]
) -> Counter[str]:
    """Run each work in a thread of its own.

    Two more threads are told of failures before anybody else could be: one records and
    waits for events on a stream all the time, one waits for the whole device.

    Args:
        stream: The stream.
        works: Each counts what it likes.

    Returns:
        The counts of all, and as ``bystander`` the errors that the thread on the stream
        was told of.
    """
    total: Counter[str] = Counter(bystander=0)
    lock = threading.Lock()
    over = threading.Event()

    def wait_for_stream() -> None:
        event = rbln.Event()
        event.record(stream)
        event.synchronize()

    def wait_for_device() -> None:
        rbln.synchronize()
        over.wait(0.001)  # the others have the interpreter

    def stand_by(name: str, wait: Callable[[], None]) -> None:
        while not over.is_set():
            try:
                wait()
            except RuntimeError:
                total[name] += 1

    def run(work: Callable[[Counter[str]], None]) -> None:
        mine: Counter[str] = Counter()
        work(mine)
        with lock:
            total.update(mine)

    waiters = [
        threading.Thread(target=stand_by, args=arguments)
        for arguments in (
            ("bystander", wait_for_stream),
            ("waits for the device", wait_for_device),
        )
    ]
    workers = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in (*waiters, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    over.set()
    for thread in waiters:
        thread.join()
    return total
