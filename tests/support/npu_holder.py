# SPDX-License-Identifier: Apache-2.0
"""A process that holds the NPUs of a simulated machine."""

# Standard
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
import subprocess
import sys

_HOLD = """
import sys, torch
torch.rbln.synchronize()
print("held", flush=True)
for line in sys.stdin:
    torch.ones(4).to("rbln").cpu()
    print("works", flush=True)
"""


@contextmanager
def npu_holder(environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Hold the NPUs in another process, which uses one for each line that it gets.

    Args:
        environment: Of the process; names the machine.
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "held"
        yield holder
    finally:
        holder.communicate("")


def use_npu(holder: subprocess.Popen[str]) -> str:
    """Let a holder use its NPU; returns what it says then."""
    assert holder.stdin is not None and holder.stdout is not None
    holder.stdin.write("\n")
    holder.stdin.flush()
    return holder.stdout.readline()
