# SPDX-License-Identifier: Apache-2.0
"""Failures of simulated copies: told to the transfer that they hit, and to no other.

Each test starts a process of its own, since faults are planned for a whole process.
"""

# Standard
from pathlib import Path
from typing import Any
import json
import subprocess
import sys

# Third Party
import pytest

pytestmark = [pytest.mark.sim]
pytest_plugins = ["rbln_sim.pytest_plugin"]

ROOT = Path(__file__).parents[5]
CAMPAIGN = ROOT / "tests" / "campaigns" / "shared_streams.py"

SETUP = f"""
import sys, threading
sys.path.append({str(ROOT / "tests" / "support")!r})
import torch
from kv_reference import Case, as_bytes, move, random_bits, transfer, upload
from lmcache.v1.platform.devices.rbln import staging

def cache(case):
    new = [random_bits(case.layer_shape, case.dtype, i) for i in range(case.num_layers)]
    return new, [upload(layer, "rbln:0") for layer in new]

def failure(*arguments):
    try:
        transfer(*arguments)
    except RuntimeError as error:
        return error
    return None
"""


def test_shared_streams(tmp_path: Path) -> None:
    """See the campaign: what it shows is what it exits with."""
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), "--transfers", "2000"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    summary = json.loads(done.stdout)
    assert summary["transfers"] >= 2000
    assert summary["transfers that raised"] > 10


def run(rbln_sim_run: Any, code: str, faults: str, **more: str) -> str:
    done = rbln_sim_run(SETUP + code, RBLN_SIM_FAULTS=faults, **more)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stderr


def test_a_failure_is_not_told_to_who_waits_for_the_caller_s_stream(
    rbln_sim_run: Any,
) -> None:
    """Small pieces, so that many are issued after the one that fails."""
    code = """
    case = Case("kv_first", 1, 6000, 1, 1, 16, torch.uint8)
    _, layers = cache(case)
    stream = torch.rbln.Stream("rbln:0")
    over = threading.Event()

    def wait():
        event = torch.rbln.Event()
        while not over.is_set():
            event.record(stream)
            event.synchronize()

    waiting = threading.Thread(target=wait)
    waiting.start()
    chunk = torch.zeros(case.chunk_shape(3000), dtype=case.dtype)
    try:
        with torch.rbln.stream(stream):
            assert failure(case, True, layers, [chunk], list(range(0, 6000, 2)), 3000)
    finally:
        over.set()
        waiting.join()
    # Nor to who comes next, whatever he waits for.
    torch.rbln.synchronize()
    stream.synchronize()
    assert staging.arena().in_use() == (0, 0)
    """
    run(rbln_sim_run, code.replace("\n    ", "\n"), "fail:d2h:100")


@pytest.mark.parametrize("waits_fail", [False, True])
def test_after_a_failed_restore_nothing_is_left_to_report(
    rbln_sim_run: Any, waits_fail: bool
) -> None:
    """A worker synchronizes the device behind a restore; also where waits fail."""
    code = f"""
    case = Case("blocks_first", 2, 6)
    _, layers = cache(case)
    chunks = [torch.zeros(case.chunk_shape(8), dtype=case.dtype) for _ in range(2)]
    failed = [failure(case, False, layers, chunks, [4, 0, 5, 1], 8) for _ in range(3)]
    # A wait that fails is the failure of who waits.
    assert sum(error is not None for error in failed) == {3 if waits_fail else 1}
    made = staging.arena()._lanes.by_device[torch.device("rbln:0")]
    assert all(lane.stream.query() for lane in made)
    if not {waits_fail}:
        torch.rbln.synchronize()
    assert staging.arena().in_use() == (0, 0)
    """
    faults = "fail:h2d:5,fail:sync:1+sticky" if waits_fail else "fail:h2d:5"
    run(rbln_sim_run, code.replace("\n    ", "\n"), faults)


@pytest.mark.parametrize("pinned", [False, True])
def test_no_failure_loses_staging(rbln_sim_run: Any, pinned: bool) -> None:
    """In place, too: the memory of a chunk is used again at once, as LMCache does."""
    code = f"""
    case = Case("mla", 3, 8, dtype=torch.float16)
    new, layers = None, None
    while layers is None:
        try:
            new, layers = cache(case)
        except RuntimeError:
            pass
    chunk = torch.zeros(case.chunk_shape(8), dtype=case.dtype, pin_memory={pinned})
    wanted = torch.zeros_like(chunk)
    move(case, True, new, [wanted], [4, 1], 8)
    failed = 0
    for _ in range(60):
        as_bytes(chunk).fill_(0)
        chunk.zero_()
        if failure(case, True, layers, [chunk], [4, 1], 8):
            failed += 1
            # Nothing writes it any more.
            chunk.zero_()
            assert not chunk.view(torch.int16).any()
        else:
            assert torch.equal(as_bytes(chunk), as_bytes(wanted))
        assert staging.arena().in_use() == (0, 0)
    assert 5 < failed < 60, failed
    """
    run(
        rbln_sim_run,
        code.replace("\n    ", "\n"),
        "fail:d2h:p=0.15",
        RBLN_SIM_SEED="3",
        RBLN_SIM_DEFERRED="1",
    )


def test_a_failure_of_the_caller_s_earlier_work_is_told(rbln_sim_run: Any) -> None:
    code = """
    case = Case("blocks_first", 2, 6)
    new, layers = cache(case)
    pinned = random_bits(case.layer_shape, case.dtype, 9).pin_memory()
    chunk = torch.zeros(case.chunk_shape(8), dtype=case.dtype)
    with torch.rbln.stream(torch.rbln.Stream("rbln:0")):
        layers[0].copy_(pinned, non_blocking=True)
        assert "failed" in str(failure(case, True, layers, [chunk], [4, 1], 8))
    assert staging.arena().in_use() == (0, 0)
    assert failure(case, True, layers, [chunk], [4, 1], 8) is None
    """
    run(rbln_sim_run, code.replace("\n    ", "\n"), "fail:h2d:3")


def test_a_lost_device_is_said_and_nobody_hangs(rbln_sim_run: Any) -> None:
    code = """
    case = Case("mla", 3, 8, dtype=torch.float16)
    _, layers = cache(case)
    staged = torch.zeros(case.chunk_shape(8), dtype=case.dtype)
    pinned = staged.pin_memory()
    error = failure(case, True, layers, [pinned], [4, 1], 8)
    while error is None:
        error = failure(case, True, layers, [pinned], [4, 1], 8)
    assert "Do not reuse that memory" in str(error), error
    for _ in range(20):
        assert failure(case, True, layers, [staged], [4, 1], 8)
    """
    run(rbln_sim_run, code.replace("\n    ", "\n"), "lost:0:40")
