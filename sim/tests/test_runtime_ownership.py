# SPDX-License-Identifier: Apache-2.0
"""Who owns an NPU, and when it is opened."""

# Standard
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
import json
import subprocess
import sys
import textwrap

# Third Party
import pytest

# First Party
from rbln_sim.pytest_plugin import Open, RunPython

pytestmark = pytest.mark.sim
USE = "import torch; torch.rbln.synchronize(); print('used')"


@pytest.fixture
def holder(rbln_sim_environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the machine's NPUs until it is killed."""
    code = """
        import sys, torch
        torch.rbln.synchronize()
        print("holding", flush=True)
        sys.stdin.read()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=rbln_sim_environment | {"RBLN_SIM_DEVICES": "2"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "holding\n"
    yield process
    process.kill()
    process.communicate()


def test_a_held_npu_counts_but_cannot_be_used(
    holder: subprocess.Popen[str], rbln_sim_fork: RunPython
) -> None:
    done = rbln_sim_fork(
        """
        import torch
        print(torch.rbln.is_available(), torch.rbln.device_count(),
              torch.rbln.get_device_name(1))
        try:
            torch.empty(4, device="rbln")
        except RuntimeError as error:
            print(str(error).splitlines()[0])
        """,
        RBLN_SIM_DEVICES="2",
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "True 2 RBLN-CR03"
    assert "rbln_register_device_id failed for rbln:0" in lines[-1]
    assert f"NPU 0 is held by pid {holder.pid} ({sys.executable} -c" in done.stderr


def monitor(environment: dict[str, str]) -> dict[str, Any]:
    """Return what the simulated rbln-smi shows."""
    done = subprocess.run(
        ["rbln-smi", "-j"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert isinstance(report, dict)
    return report


def test_the_monitor_tells_who_holds_an_npu_and_opens_none(
    holder: subprocess.Popen[str],
    rbln_sim_environment: dict[str, str],
    rbln_sim_opens: Callable[[], list[Open]],
) -> None:
    environment = rbln_sim_environment | {"RBLN_SIM_DEVICES": "3"}
    opens = rbln_sim_opens()
    report = monitor(environment)
    assert [(d["npu"], d["name"]) for d in report["devices"]] == [
        (npu, "RBLN-CR03") for npu in range(3)
    ]
    assert [(c["npu"], c["pid"]) for c in report["contexts"]] == [
        (npu, str(holder.pid)) for npu in range(2)
    ]
    assert report["contexts"][0]["process"].startswith(f"{sys.executable} -c ")
    holder.kill()
    holder.wait()
    assert monitor(environment)["contexts"] == []
    assert rbln_sim_opens() == opens


def test_the_monitor_shows_the_machine_only(
    rbln_sim_environment: dict[str, str], tmp_path: Path
) -> None:
    del rbln_sim_environment["RBLN_SIM_STATE_DIR"]
    environment = rbln_sim_environment | {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert monitor(environment)["contexts"] == []  # nobody made the folder yet
    for words, code, said in (
        (["group"], 2, "only `rbln-smi -j` is simulated"),
        (["-j"], 1, "invalid literal"),
    ):
        done = subprocess.run(
            ["rbln-smi", *words],
            env=environment | {"RBLN_SIM_DEVICES": "two"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_an_npu_is_free_when_its_holder_is_killed(
    holder: subprocess.Popen[str], rbln_sim_fork: RunPython
) -> None:
    assert rbln_sim_fork(USE).returncode != 0
    holder.kill()
    holder.wait()
    assert rbln_sim_fork(USE).stdout == "used\n"


@pytest.mark.rbln_sim(devices=3)
def test_visible_devices_choose_what_is_opened(
    rbln_sim_run: RunPython, rbln_sim_opens: Callable[[], list[Open]]
) -> None:
    for visible in ("1", "2,0"):
        done = rbln_sim_run(USE, RBLN_VISIBLE_DEVICES=visible)
        assert done.stdout == "used\n", done.stderr
    opens = rbln_sim_opens()
    assert [entry.npu for entry in opens[:1]] == [1]
    assert sorted(entry.npu for entry in opens[1:]) == [0, 2]
    assert opens[1].pid == opens[2].pid != opens[0].pid
    assert opens[0].time <= opens[1].time
    assert "torch.rbln.synchronize()" in opens[0].argv


def test_looking_opens_nothing_and_using_opens(
    rbln_sim_fork: RunPython, rbln_sim_opens: Callable[[], list[Open]]
) -> None:
    done = rbln_sim_fork(
        """
        import os, torch
        assert torch.rbln.is_available()
        assert torch.rbln.device_count() == torch.rbln.physical_device_count() == 1
        torch.rbln.get_device_properties(0)
        assert torch.rbln.memory_stats() == {}
        torch.manual_seed(0)
        torch.empty(4, pin_memory=True)
        assert not os.path.exists(os.environ["RBLN_SIM_OPEN_LOG"])
        uses = (
            torch.rbln.synchronize,
            lambda: torch.empty(4, device="rbln"),
            torch.rbln.Stream,
            lambda: torch.rbln.Event().record(),
            torch.rbln.mem_get_info,
        )
        for use in uses:
            child = os.fork()
            if child == 0:
                use()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        """
    )
    assert done.returncode == 0, done.stderr
    opens = [entry.pid for entry in rbln_sim_opens()]
    assert len(opens) == len(set(opens)) == 5


def test_a_fork_of_an_owner_cannot_use_the_npu(rbln_sim_fork: RunPython) -> None:
    done = rbln_sim_fork(
        """
        import os, torch
        tensor = torch.arange(4).to("rbln")
        child = os.fork()
        if child == 0:
            try:
                tensor.cpu()
            except RuntimeError:
                os._exit(3)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), tensor.cpu().tolist())
        """
    )
    assert done.stdout.splitlines()[-1] == "3 [0, 1, 2, 3]", done.stderr
    assert "rbln_memcpy_v2h: this process was forked from process" in done.stderr


def test_a_fork_before_the_first_use_can(rbln_sim_fork: RunPython) -> None:
    done = rbln_sim_fork(
        """
        import os, torch
        assert torch.rbln.is_available()
        child = os.fork()
        if child == 0:
            ok = torch.arange(4).to("rbln").cpu().tolist() == [0, 1, 2, 3]
            os._exit(0 if ok else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert done.stdout == "0\n", done.stderr


def test_a_wrong_choice_of_devices_is_named(rbln_sim_fork: RunPython) -> None:
    done = rbln_sim_fork(
        """
        import torch
        print(torch.rbln.is_available(), torch.rbln.device_count())
        torch.empty(4, device="rbln")
        """,
        RBLN_VISIBLE_DEVICES="7",
    )
    assert done.stdout.splitlines()[-1] == "False 0"
    assert done.returncode != 0
    assert "RBLN_VISIBLE_DEVICES='7': '7' is not one of the 1 NPU(s)" in done.stderr
