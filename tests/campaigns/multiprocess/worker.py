# SPDX-License-Identifier: Apache-2.0
"""A worker of the campaign: LMCache's adapters over an NPU, with no engine around."""

# Future
from __future__ import annotations

# Standard
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
import os
import random
import threading
import traceback

# Third Party
import zmq

# First Party
from lmcache.integration.vllm import vllm_multi_process_adapter as adapters
from lmcache.v1.multiprocess.transfer_context import async_engine_driven
from lmcache.v1.platform.devices.rbln import staging, transfer_context
from tests.campaigns.multiprocess.kv import (
    BLOCK,
    CHUNK,
    LONGEST,
    PROMPTS,
    TENANTS,
    Job,
    KVCache,
    tokens_of,
)
from tests.campaigns.multiprocess.tap import SOON_S, Fault, Tap
from tests.support.lmcache_release import as_handed_over

MODEL = "model"


class Worker:
    """What vLLM's worker and scheduler do with LMCache's adapters.

    Args:
        options: Layout, transport and threads of the seed.
        port: Of the server.
        fired: See :class:`Tap`.
        poll: Returns whether the campaign says that the server is lost.
    """

    def __init__(
        self, options: Any, port: int, fired: Any, poll: Callable[[], bool]
    ) -> None:
        self._poll = poll
        self._kv = KVCache(options.layout, later=not options.device_faults)
        self._jobs: list[Job] = []
        self._lookups: dict[str, Job] = {}
        self._failed: set[int] = set()
        self._number = 0
        self._beats: list[threading.Thread] = []
        self._beating = threading.Lock()
        self._hits, self._found = 0, Counter[str]()
        self._files = _files()
        self._zmq = zmq.Context()
        # None comes by itself.
        setattr(adapters.HeartbeatThread, "start", lambda _: None)  # noqa: B010
        address = f"tcp://127.0.0.1:{port}"
        alone = adapters.ParallelStrategy(False, 1, 0, 1, 1, 1)
        timing: dict[str, Any] = {"mq_timeout": SOON_S, "heartbeat_interval": 3600.0}
        self._adapter = adapters.LMCacheMPWorkerAdapter(
            address, self._zmq, MODEL, BLOCK, alone, **timing
        )
        self._scheduler = adapters.LMCacheMPSchedulerAdapter(
            [address], self._zmq, MODEL, BLOCK, alone, **timing
        )
        self._tap = Tap(self._adapter.req_client, fired)
        init = async_engine_driven.AsyncEngineDrivenTransferContext.__init__
        init.__defaults__ = (options.threads,)
        transfer_context.RESTORE_THREADS = options.threads
        caches = {f"layer.{i}": layer for i, layer in enumerate(self._kv.layers)}
        self._adapter.register_kv_caches(caches, layout_hints={})

    def step(
        self, seed: int, server_pid: int, fault: Fault | None, skip: int
    ) -> tuple[int, Counter[str]]:
        """Store and load for some requests, with a fault, and check every block.

        Returns:
            Tokens that were hit, and what came of it.

        Raises:
            AssertionError: If a byte is wrong.
        """
        rng = random.Random(seed)
        self._tap.server_pid = server_pid
        self._beat()
        self._hits, self._found = 0, Counter()
        self._tap.arm(fault, skip)
        for _ in range(2):
            for _ in range(rng.randint(1, 3)):
                self._store(rng)
            for _ in range(rng.randint(4, 9)):
                self._look_up(rng)
            self._finish(rng)
            self._check()
        self._tap.arm(None, 0)
        for beat in self._beats:
            beat.join()
        self._beats.clear()
        return self._hits, self._found

    def _new(self, rng: random.Random, load: bool) -> Job:
        self._number += 1
        name = f"{os.getpid()}-{self._number}"
        return Job(name, load, rng.choice(TENANTS), rng.randrange(PROMPTS))

    def _store(self, rng: random.Random) -> None:
        job = self._new(rng, load=False)
        job.end = CHUNK * rng.randint(1, LONGEST)
        job.start = CHUNK * rng.choice((0, 0, 0, rng.randrange(job.end // CHUNK)))
        if not self._kv.allocate(rng, job):
            return
        self._kv.compute(job)
        adapter = self._adapter
        event = adapter.create_recorded_event()
        adapter.submit_store_request(job.name, self._op(job), event, job.tenant)
        self._jobs.append(job)

    def _look_up(self, rng: random.Random) -> None:
        job = self._new(rng, load=True)
        job.end = CHUNK * rng.randint(LONGEST // 2, LONGEST)
        tokens = tokens_of(job.prompt)[: job.end]
        self._scheduler.maybe_submit_lookup_request(job.name, tokens, job.tenant)
        self._lookups[job.name] = job
        self._tap.reach("load: looking up")

    def _load(self, rng: random.Random, job: Job, hit: int) -> None:
        """Load what was found, as vLLM does when it has computed some by itself."""
        self._tap.reach("load: found")
        self._hits += hit
        self._scheduler.cleanup_lookup_result(job.name)
        computed = rng.choice((0, 0, BLOCK, BLOCK * rng.randint(0, 8)))
        job.end, job.start = hit, computed // CHUNK * CHUNK
        job.skip = computed - job.start
        tokens = tokens_of(job.prompt)[:hit]
        if not hit or computed >= hit or not self._kv.allocate(rng, job):
            if hit:
                self._scheduler.free_lookup_locks(tokens, 0, hit, job.name, job.tenant)
            self._scheduler.end_session(job.name)
            return
        if job.start:
            self._scheduler.free_lookup_locks(tokens, 0, computed, job.name, job.tenant)
        event = self._adapter.create_recorded_event()
        self._adapter.submit_retrieve_request(
            job.name, self._op(job), event, job.tenant
        )
        self._jobs.append(job)

    def _finish(self, rng: random.Random) -> None:
        """Go on, as the engine does, until every request has ended."""
        ended, rounds = {job.name for job in self._jobs}, 0
        while self._lookups or not all(job.reported for job in self._jobs):
            rounds += 1
            if rounds % 64 == 0 and not any(each.is_alive() for each in self._beats):
                # Not every ten seconds; what waits for a server may need it.
                self._beats.append(threading.Thread(target=self._beat))
                self._beats[-1].start()
            if self._poll():
                self.lose()
            while self._tap.wanted:
                ended |= self._interrupt(rng, self._tap.wanted.pop())
            for job in list(self._lookups.values()):
                hit = self._scheduler.check_lookup_result(job.name)
                if hit is None and not self._scheduler.is_healthy:
                    hit = 0
                if hit is not None:
                    del self._lookups[job.name]
                    self._load(rng, job, hit)
            stores, loads = self._adapter.get_finished(ended)
            self._failed |= self._adapter.get_block_ids_with_load_errors()
            ended = set()
            for job in self._jobs:
                done = (loads if job.load else stores) or ()
                if not job.reported and job.name in done:
                    job.reported = True
                    self._scheduler.end_session(job.name)
            open_loads = [each for each, _ in self._adapter.retrieve_futures.values()]
            for future in [*self._adapter.store_futures.values(), *open_loads][:1]:
                future.wait(0.002)

    def _interrupt(self, rng: random.Random, what: str) -> set[str]:
        """Preempt or abort all there are; returns those that end."""
        if what == "blocks preempted":
            self._adapter.handle_preemptions(True)
            for job in self._jobs:
                if not job.load and not job.reported:
                    other = Job("", False, rng.choice(TENANTS), rng.randrange(PROMPTS))
                    other.blocks, other.end = job.blocks, len(job.blocks) * BLOCK
                    self._kv.compute(other)
            return set()
        for job in self._lookups.values():
            self._scheduler.abandon_lookup(job.name)
            self._scheduler.cleanup_lookup_result(job.name)
            self._scheduler.end_session(job.name)
        self._lookups.clear()
        loads = {job.name for job in self._jobs if job.load and not job.reported}
        self._adapter.report_as_loads_only(loads)
        return loads

    def _check(self) -> None:
        """Compare every block with what it must hold, and compute what was lost."""
        lost: list[Job] = []
        for job in self._jobs:
            if not job.load:
                self._found["chunks stored"] += (job.end - job.start) // CHUNK
            elif self._failed & set(job.blocks):
                assert self._failed >= set(job.blocks), "some blocks of a load failed"
                lost.append(job)
                self._found["loads lost"] += 1
            else:
                self._kv.expect(job)
                self._found["chunks verified"] += (job.end - job.start) // CHUNK
        self._kv.check(self._jobs, [block for job in lost for block in job.blocks])
        for job in lost:
            job.skip = 0
            self._kv.compute(job)
        for job in self._jobs:
            self._kv.free += job.blocks
        self._jobs.clear()
        self._failed.clear()

    def _op(self, job: Job) -> Any:
        tokens = as_handed_over(tokens_of(job.prompt)[: job.end])
        return adapters.LoadStoreOp(tokens, [job.blocks], job.start, job.end, job.skip)

    def lose(self) -> None:
        """Miss a heartbeat, as when the server stays away for longer."""
        self._adapter._health_event.clear()
        for event in self._scheduler._health_events.values():
            event.clear()

    def _beat(self) -> None:
        """Have a heartbeat, as the threads of the adapters do."""
        self._adapter._ensure_heartbeat_started()
        self._scheduler._ensure_heartbeat_started()
        heartbeats = [
            self._adapter._heartbeat,
            *(self._scheduler._heartbeats or {}).values(),
        ]
        with self._beating:
            for heartbeat in heartbeats:
                assert heartbeat is not None
                heartbeat._execute()

    def close(self) -> None:
        """Stop as vLLM does.

        Raises:
            AssertionError: If anything is left.
        """
        assert staging.arena().in_use() == (0, 0)
        self._adapter.shutdown()
        self._scheduler.shutdown()
        self._zmq.term()
        threads = [t.name for t in threading.enumerate() if t.name != "MainThread"]
        assert not threads, f"threads {threads} are left"
        left = [file for file in _files() if file not in self._files]
        assert not left, f"files {left} are left open"
        assert "lmcache_l1_pool" not in Path("/proc/self/maps").read_text()


def work(conn: Any, options: Any, port: int, fired: Any, plant: Any) -> None:
    """Be a worker until the campaign says that it is over."""

    def poll() -> bool:
        return bool(conn.poll() and conn.recv() == ("lost",))

    try:
        if plant is not None:
            plant()
        worker = Worker(options, port, fired, poll)
        conn.send(("ready", None))
        while (said := conn.recv())[0] != "end":
            if said[0] == "step":
                conn.send(("done", worker.step(*said[1:])))
            else:
                worker.lose()
        worker.close()
        conn.send(("ended", None))
    except BaseException:
        conn.send(("failed", traceback.format_exc()))


def _files() -> set[str]:
    """What this process has open."""
    found = set()
    for opened in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # the folder itself
            found.add(f"{opened.name} {os.readlink(opened)}")
    return found
