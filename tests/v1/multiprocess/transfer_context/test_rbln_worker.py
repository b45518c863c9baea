# SPDX-License-Identifier: Apache-2.0
"""LMCache's worker beside a real server: failures, tenants, restarts, wrong mode."""

# Standard
from collections.abc import Iterator
from pathlib import Path
from typing import Any
import json
import os
import stat

# Third Party
import psutil
import pytest

# First Party
from rbln_sim.pytest_plugin import machine_environment
from tests.e2e.stack import wait_until
from tests.e2e.starts import Ended
from tests.support.forked_programs import forking
from tests.support.serving import processes
from tests.support.serving.servers import (
    CacheServer,
    CacheServerConfig,
    running,
)

pytestmark = [pytest.mark.sim, pytest.mark.slow]
WORKER = Path(__file__).parents[3] / "support" / "mp_worker.py"
#: As mp_worker.py has them, which can't be imported without opening the NPU's runtime.
LAYERS, CHUNK = 2, 16
TO = [1, 10, 5, 2]
#: The first gather and the first scatter; before it each layer is copied to the NPU.
FAULTS = f"fail:d2h:1,fail:h2d:{LAYERS + 1}"
TENANTS = ("tenant-A", "tenant-B", "")


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    """Fork servers and workers from a process that has vLLM imported."""
    with forking():
        yield


def cache_server(folder: Path, shm: bool, *arguments: str, **mode: str) -> CacheServer:
    """Make a server; its log and its working directory are in ``folder``."""
    name = f"rbln_worker_{os.getpid()}" if shm else ""
    return CacheServer(
        CacheServerConfig(
            CHUNK, shm_name=name, l1_size_gb=0.1, extra_args=arguments, **mode
        ),
        {**machine_environment(folder / "machine"), "PYTHONHASHSEED": "0"},
        folder,
    )


@pytest.fixture(scope="module", params=["SHM", "pickle"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CacheServer]:
    """A server of each transport."""
    folder = tmp_path_factory.mktemp("server")
    with running(cache_server(folder, shm=request.param == "SHM")) as server:
        yield server


def work(
    server: CacheServer, folder: Path, *steps: list[str], **settings: object
) -> Ended:
    """Run a worker process to its end."""
    log = folder / "worker.log"
    command = [str(WORKER), str(server.port), json.dumps(steps)]
    env = machine_environment(folder / "worker", **settings)
    status = processes.launch(command, env, folder, log).wait(600)
    return Ended(status, log.read_text())


def results(done: Ended) -> list[Any]:
    """What each step returned."""
    assert done.status == 0, done.log
    [printed] = [line for line in done.log.splitlines() if line.startswith("[RESULTS]")]
    found: list[Any] = json.loads(printed.removeprefix("[RESULTS]"))
    return found


@pytest.mark.parametrize("sync", [False, True], ids=["asynchronous", "synchronous"])
def test_failures_reach_vllm_and_leave_nothing_behind(
    server: CacheServer, sync: bool, tmp_path: Path
) -> None:
    server.clear()
    steps: list[tuple[list[str], Any]] = [
        (["context"], f"{'EngineDriven' if sync else 'Rbln'}TransferContext"),
        (["store", "a"], False),
        (["found", "b"], 0),
        # Its slots are free again.
        (["store", "c"], True),
        (["found", "d"], 2),
        # vLLM computes these blocks again.
        (["retrieve", "d"], {"finished": ["d"], "failed": sorted(TO)}),
        # The chunks are not locked, and sound.
        (["found", "e"], 2),
        (["retrieve", "e"], {"finished": ["e"], "failed": []}),
        (["is_exact"], True),
        (["prepare_only", "f"], 2 if server.segment else 0),
    ]
    first = [["synchronous"]] if sync else []
    done = work(
        server, tmp_path, *first, *(step for step, _ in steps), faults=FAULTS, seed=1
    )
    assert results(done) == [wanted for _, wanted in steps], done.log
    # What the worker reserved and never filled is there for nobody.
    server.wait_stored(2)


def test_a_server_that_is_new_is_registered_with(
    server: CacheServer, tmp_path: Path
) -> None:
    """At the next heartbeat, though every heartbeat was answered."""
    server.clear()
    steps: list[tuple[list[str], Any]] = [
        (["store", "a"], True),
        (["forgotten"], None),
        (["store_without_an_answer", "b"], False),
        # vLLM gets its blocks back.
        (["heartbeat", "b"], [False, ["b"]]),
        (["found", "c"], 2),
        (["retrieve", "c"], {"finished": ["c"], "failed": []}),
        (["is_exact"], True),
    ]
    done = work(server, tmp_path, *(step for step, _ in steps))
    assert results(done) == [wanted for _, wanted in steps], done.log
    assert done.log.count("Finished re-registering") == 1


def test_a_worker_does_not_wait_for_a_server_that_is_gone(tmp_path: Path) -> None:
    with running(cache_server(tmp_path / "server", True)) as server:
        steps = [["store", "a"], ["without", str(server.process.pid)]]
        done = work(server, tmp_path, *steps)
    assert results(done) == [True, None]
    assert "it is not waited for" in done.log, done.log


def test_what_waits_for_a_server_ends_with_it(tmp_path: Path) -> None:
    """Without a heartbeat, which could come when another one is there."""
    with running(cache_server(tmp_path / "server", True)) as server:
        done = work(server, tmp_path, ["lost", str(server.process.pid)])
    assert results(done) == [[False, "TimeoutError"]]


def test_loads_of_one_prompt_leave_nothing_locked(
    server: CacheServer, tmp_path: Path
) -> None:
    server.clear()
    steps = [["store", "a"], ["found", "b"], ["found", "c"]]
    steps += [["retrieve_together", "b", "c"], ["is_exact"]]
    done = work(server, tmp_path, *steps)
    both = {"finished": ["b", "c"], "failed": []}
    assert results(done) == [True, 2, 2, both, True], done.log
    server.wait_stored(2)


def test_tenants_stay_apart_and_find_their_own_after_a_restart(
    server: CacheServer, tmp_path: Path
) -> None:
    server.clear()
    stores = [
        step
        for tenant in TENANTS
        for step in (["found", f"look {tenant}", tenant], ["store", tenant, tenant])
    ]
    assert results(work(server, tmp_path, *stores)) == [0, True] * 3
    # A new process, as when vLLM is restarted.
    loads = [
        step
        for tenant in TENANTS
        for step in (
            ["found", f"again {tenant}", tenant],
            ["retrieve", f"again {tenant}", tenant],
        )
    ]
    said = results(work(server, tmp_path, *loads, ["is_exact"]))
    assert said[0:6:2] == [2, 2, 2]
    assert [load["failed"] for load in said[1:6:2]] == [[], [], []]
    assert said[6]
    server.wait_stored(6)


def test_tenants_stay_apart_after_a_restart_of_the_server(tmp_path: Path) -> None:
    """What it keeps on disk outlives it, each tenant's for this tenant."""
    disk = tmp_path / "disk"
    disk.mkdir()
    keeps = ("--l2-adapter", json.dumps({"type": "fs", "base_path": str(disk)}))
    with running(cache_server(tmp_path / "first", True, *keeps)) as server:
        for tenant in TENANTS[:2]:
            assert results(work(server, tmp_path, ["store", "a", tenant])) == [True]
        # Two chunks of each; a file gets its name when it is complete.
        wait_until(lambda: len(list(disk.rglob("*.data"))) == 4, "chunks on the disk")
    with running(cache_server(tmp_path / "second", True, *keeps)) as server:
        steps = [["found", "other", "tenant-C"], ["found", "none", ""]]
        steps += [["found", "a", "tenant-A"], ["retrieve", "a", "tenant-A"]]
        assert results(work(server, tmp_path, *steps, ["is_exact"])) == [
            0,
            0,
            2,
            {"finished": ["a"], "failed": []},
            True,
        ]


def test_a_message_runs_nothing_in_the_server(
    server: CacheServer, tmp_path: Path
) -> None:
    """Its worker is answered in order, so it has read that one."""
    server.clear()
    made = tmp_path / "made"
    done = work(server, tmp_path, ["commit_what_makes", str(made)], ["store", "a"])
    assert results(done) == [None, True], done.log
    assert not made.exists()


def test_only_this_user_on_this_machine_reaches_it(server: CacheServer) -> None:
    listening = [
        connection.laddr.ip
        for connection in psutil.Process(server.process.pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 2
    assert set(listening) == {"127.0.0.1"}
    if server.segment is not None:
        assert stat.S_IMODE(server.segment.stat().st_mode) == 0o600


def test_a_server_in_the_wrong_mode_is_named(tmp_path: Path) -> None:
    with running(
        cache_server(tmp_path, True, transfer_mode="lmcache_driven")
    ) as server:
        done = work(server, tmp_path, ["context"])
    assert done.status == 1
    # torch-rbln says afterwards what it leaves to the end of the process.
    said = [line for line in done.log.splitlines() if "rbln_free" not in line]
    last = [line for line in said if line.strip()][-1]
    assert "`--supported-transfer-mode engine_driven`" in last, done.log
