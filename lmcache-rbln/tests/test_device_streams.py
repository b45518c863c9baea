# SPDX-License-Identifier: Apache-2.0
"""A failure is told to the transfer that it hit, and to nobody else."""

# Standard
from pathlib import Path
from typing import Any
import json
import os
import subprocess
import sys
import threading

# Third Party
from rbln_sim.pytest_plugin import machine_environment
import pytest
import torch

# First Party
from lmcache_rbln import device_streams
from lmcache_rbln.device_streams import DeviceStreams, InFlightError, streams_of

HERE = Path(__file__).parent
DEVICE = torch.device("rbln:0")


def run_with_faults(
    folder: Path, program: str, *arguments: object, **settings: object
) -> tuple[dict[str, Any], str]:
    """Run a program on a machine of its own; returns what it printed and stderr."""
    environment = machine_environment(folder, devices=1, **settings)
    support = str(HERE.parents[1] / "tests/support")
    environment["PYTHONPATH"] += os.pathsep + support
    ended = subprocess.run(
        [sys.executable, str(HERE / program), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1]), ended.stderr


# (copies that fail, deferred completion, transfers, copies of each)
SHARED = {
    "one copy each": ("fail:d2d:p=0.002", 0, 4000, 1),
    "many copies": ("fail:d2d:p=0.002", 0, 400, 50),
    "late copies": ("fail:d2d:p=0.01", 1, 100, 2),
}


@pytest.mark.sim
@pytest.mark.parametrize("case", SHARED)
def test_failures_over_one_callers_stream_are_told_to_whom_they_hit(
    tmp_path: Path, case: str
) -> None:
    faults, deferred, transfers, copies = SHARED[case]
    got, errors = run_with_faults(
        tmp_path,
        "rds_shared_stream.py",
        *(4, transfers, copies),
        faults=faults,
        deferred=deferred,
    )
    assert got["silent"] == got["spurious"] == got["bystander"] == 0
    assert 0 < got["raised"] <= errors.count("strikes d2d")
    assert got["free"] == got["slots"]


@pytest.mark.sim
def test_waits_that_fail_cost_no_staging_memory(tmp_path: Path) -> None:
    got, errors = run_with_faults(
        tmp_path,
        "rds_shared_stream.py",
        *(4, 2000, 2),
        faults="fail:d2d:p=0.01,fail:sync:p=0.01",
    )
    assert errors.count("strikes sync") > got["bystander"] > 0  # its own
    assert got["silent"] == 0
    assert got["raised"] > 0
    assert got["free"] == got["slots"]


@pytest.mark.sim
def test_copies_of_the_backend_fail_apart_from_the_engine(tmp_path: Path) -> None:
    got, errors = run_with_faults(
        tmp_path,
        "rds_failing_copies.py",
        *(3, 100),
        faults="fail:d2h:p=0.05,fail:h2d:p=0.05",
    )
    assert errors.count("strikes d2h") > 5 and errors.count("strikes h2d") > 5
    assert got["wrong"] == got["bystander"] == got["lost"] == 0
    assert 300 > got["stored"] > got["restored"] > 100
    assert got["free"] == got["slots"]


@pytest.mark.sim
@pytest.mark.parametrize(
    ("what", "fails"), [("transfer", 2), ("gather", 2), ("scatter", 6)]
)
def test_a_failure_that_others_are_told_of_first_is_told_to_the_transfer_too(
    tmp_path: Path, what: str, fails: int
) -> None:
    got, errors = run_with_faults(
        tmp_path, "rds_told_elsewhere.py", what, faults=f"fail:d2d:{fails}"
    )
    assert errors.count("strikes d2d") == 1
    assert got["told"] > 0
    assert got["raised"]
    assert got["again"]


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of a device that ends no wait."""

    def drain(self: Any) -> None:
        raise InFlightError("planted")

    monkeypatch.setattr(device_streams._OwnStream, "drain", drain)


@pytest.mark.npu
def test_a_stream_that_does_not_end_is_not_used_again(lost: None) -> None:
    streams = DeviceStreams(DEVICE, most=2)
    for _ in range(2):
        with pytest.raises(InFlightError), streams.transfer():
            pass
    none_left = pytest.raises(RuntimeError, match="no stream of rbln:0 is left")
    with none_left, streams.transfer():
        pass


@pytest.mark.npu
def test_whoever_waits_for_a_stream_learns_that_there_will_be_none(
    lost: None,
) -> None:
    streams = DeviceStreams(DEVICE, most=1)
    told: list[str] = []

    def wait() -> None:
        try:
            with streams.transfer():
                pass
        except RuntimeError as error:
            told.append(str(error))

    with pytest.raises(InFlightError), streams.transfer():
        waiter = threading.Thread(target=wait)
        waiter.start()
    waiter.join(timeout=60)
    assert len(told) == 1 and "no stream of rbln:0 is left" in told[0]


@pytest.mark.npu
def test_many_threads_share_few_streams() -> None:
    streams = DeviceStreams(DEVICE, most=3)
    tensors = [torch.zeros(64, device=DEVICE) for _ in range(12)]
    used: set[int] = set()

    def copy(number: int) -> None:
        for _ in range(20):
            with streams.transfer():
                stream = torch.rbln.current_stream(DEVICE)  # type: ignore[attr-defined]
                used.add(stream.stream_id)
                tensors[number].fill_(number)

    threads = [threading.Thread(target=copy, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert 1 <= len(used) <= 3
    assert [int(tensor[0]) for tensor in tensors] == list(range(12))
    assert streams_of(DEVICE) is streams_of(torch.device("rbln", 0))


@pytest.mark.npu
def test_an_error_in_the_block_leaves_the_stream_to_others() -> None:
    streams = DeviceStreams(DEVICE, most=1)
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), streams.transfer(ordered=True):
            raise error
    with streams.transfer(ordered=True):
        pass
