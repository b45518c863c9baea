# SPDX-License-Identifier: Apache-2.0
"""Faults from a seed, through the real torch-rbln and across processes."""

# Third Party
import pytest

# First Party
from rbln_sim.pytest_plugin import RunPython

pytestmark = pytest.mark.sim

# Copies of both directions, synchronous and not; each failure is survived, and told.
PROGRAM = """
import torch
cache = torch.empty(64, 256, dtype=torch.uint8, device="rbln")
torch.rbln.bind_device_memory(cache)
pinned = torch.empty(64, 256, dtype=torch.uint8, pin_memory=True)
failed = []
for number in range(120):
    row = number % 64
    try:
        if number % 3 == 0:
            cache[row].copy_(pinned[row], non_blocking=True)
        elif number % 3 == 1:
            pinned[row].copy_(cache[row], non_blocking=True)
        else:
            cache[row].copy_(torch.ones(256, dtype=torch.uint8))
        torch.rbln.synchronize()
    except RuntimeError:
        failed.append(number)
print(failed)
"""
RULES = "fail:d2h:p=0.1,fail:h2d:p=0.1,delay:sync:p=0.05:1ms,fail:any:200"


def _told(rbln_sim_fork: RunPython, **variables: str) -> tuple[list[str], str]:
    """Return the lines that tell of faults, and what the program saw."""
    done = rbln_sim_fork(PROGRAM, RBLN_SIM_FAULTS=RULES, **variables)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    faults = [line for line in lines if line.startswith("[rbln-sim] fault: ")]
    return faults, done.stdout.splitlines()[-1]  # torch-rbln logs to stdout as well


def test_the_same_seed_has_the_same_faults_in_every_process(
    rbln_sim_fork: RunPython,
) -> None:
    first = _told(rbln_sim_fork, RBLN_SIM_SEED="7")
    # Deferred copies run at other times, which must not matter.
    second = _told(rbln_sim_fork, RBLN_SIM_SEED="7", RBLN_SIM_DEFERRED="5")
    other = _told(rbln_sim_fork, RBLN_SIM_SEED="8")
    assert first == second
    assert first[0] != other[0] and first[1] != other[1]
    for lines, _ in (first, other):
        assert len(lines) > 10
        for rule in RULES.split(","):
            assert any(f" {rule} strikes " in line for line in lines), rule
    assert all(line.endswith(", seed 7") for line in first[0])
    assert all(line.endswith(", seed 8") for line in other[0])


def test_a_process_ends_while_a_copy_hangs(rbln_sim_run: RunPython) -> None:
    code = """
    import torch
    cache = torch.empty(256, dtype=torch.uint8, device="rbln")
    torch.rbln.bind_device_memory(cache)
    pinned = torch.zeros(256, dtype=torch.uint8, pin_memory=True)
    pinned.copy_(cache, non_blocking=True)
    print(torch.rbln.current_stream().query())
    """
    done = rbln_sim_run(code, RBLN_SIM_FAULTS="hang:d2h:1")
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert "fault: hang:d2h:1 strikes d2h 1 " in done.stderr
