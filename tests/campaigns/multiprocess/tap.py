# SPDX-License-Identifier: Apache-2.0
"""The steps of a transfer, and faults that strike at them."""

# Standard
from typing import Any
import os
import signal
import threading

# First Party
from lmcache.v1.multiprocess.transfer_context import async_engine_driven
from lmcache.v1.multiprocess.transfer_context.shm import ABORT_STORE
from lmcache.v1.platform.devices.rbln import transfer_context

Names = tuple[str, ...]
STORE: Names = (
    "asking",
    "asked",
    "slots",
    "reading",
    "read",
    "committing",
    "sent",
    "stored",
)
LOAD: Names = ("looking up", "found", "asking", "asked", "chunks", "writing", "written")
LOAD += ("committing", "sent", "taken back")
STEPS = [*(f"store: {at}" for at in STORE), *(f"load: {at}" for at in LOAD)]
KINDS: Names = ("worker killed", "server killed", "worker forgotten", "request aborted")
KINDS += ("chunks evicted",)
Fault = tuple[str, str]
#: Every kind of fault at every step.
FAULTS = [(kind, at) for kind in KINDS for at in STEPS]
FAULTS += [("blocks preempted", at) for at in STEPS if at.startswith("store")]
#: Those of the NPU come by chance.
READ_FAILED = ("D2H failed", "store: reading")
WRITE_FAILED = ("H2D failed", "load: writing")
COUNTED = [*FAULTS, READ_FAILED, WRITE_FAILED]
SOON_S = 120.0


class Tap:
    """Sees each step of each transfer of a worker, and strikes at the one wanted.

    Args:
        client: The worker's client of its server.
        fired: How often each of ``COUNTED`` has struck, shared by all processes.

    Attributes:
        server_pid: The server.
        wanted: What the engine's thread is to do.
    """

    def __init__(self, client: Any, fired: Any) -> None:
        self._client, self._fired = client, fired
        self._lock = threading.Lock()
        self._armed: Fault | None = None
        self._skip = self.server_pid = 0
        self.wanted: list[str] = []
        for name, *steps in (
            ("prepare_store", "store", 0, 1, 2),
            ("commit_store", "store", 5, 6, 7),
            ("prepare_retrieve", "load", 2, 3, 4),
            ("commit_retrieve", "load", 7, 8, 9),
        ):
            self._see_requests(name, *_steps(*steps))
        gather, scatter = "gather_paged_kv_to_cpu", "scatter_cpu_to_paged_kv"
        self._see_copies(
            async_engine_driven, gather, READ_FAILED, *_steps("store", 3, 4)
        )
        self._see_copies(transfer_context, scatter, WRITE_FAILED, *_steps("load", 5, 6))

    def arm(self, fault: Fault | None, skip: int) -> None:
        """Strike when a step has been reached ``skip`` times."""
        with self._lock:
            self._armed, self._skip = fault, skip

    def reach(self, step: str) -> None:
        """Note that a transfer is at a step."""
        with self._lock:
            fault = self._armed
            if fault is None or fault[1] != step:
                return
            self._skip -= 1
            if self._skip >= 0:
                return
            self._armed = None
        self._count(fault)
        if fault[0] == "worker killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault[0] == "server killed":
            os.kill(self.server_pid, signal.SIGKILL)
        elif fault[0] == "worker forgotten":
            os.kill(self.server_pid, signal.SIGUSR1)
        elif fault[0] == "chunks evicted":
            # All that are not locked. A thread of the client's can't wait for it.
            evicted = self._client.clear(force=False)
            if threading.current_thread().name.startswith("lmcache_"):
                evicted.wait(SOON_S)
        else:
            self.wanted.append(fault[0])

    def _count(self, fault: Fault) -> None:
        with self._lock:
            self._fired[COUNTED.index(fault)] += 1

    def _see_requests(self, name: str, before: str, sent: str, answered: str) -> None:
        call = getattr(self._client, name)

        def seen(key: Any, *args: Any) -> Any:
            if args[-1] == ABORT_STORE:
                return call(key, *args)
            self.reach(before)
            future = call(key, *args)
            self.reach(sent)
            future.add_done_callback(lambda _: self.reach(answered))
            return future

        setattr(self._client, name, seen)

    def _see_copies(
        self, module: Any, name: str, fault: Fault, before: str, after: str
    ) -> None:
        call = getattr(module, name)

        def seen(*args: Any, **kwargs: Any) -> Any:
            self.reach(before)
            try:
                result = call(*args, **kwargs)
            except RuntimeError:
                self._count(fault)
                raise
            self.reach(after)
            return result

        setattr(module, name, seen)


def _steps(transfer: Any, *numbers: Any) -> list[str]:
    names = STORE if transfer == "store" else LOAD
    return [f"{transfer}: {names[number]}" for number in numbers]
