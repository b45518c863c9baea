# SPDX-License-Identifier: Apache-2.0
"""The NPU that a benchmark measures on: a real one, or the simulator."""

# Standard
import os
import sys
import tempfile

# First Party
from tests.support.serving.runtime import Runtime, find_runtime

#: Folders that live as long as the process.
_kept: list["tempfile.TemporaryDirectory[str]"] = []


def use(wanted: str) -> Runtime:
    """Make this process and its children use an NPU; call it before importing torch.

    Args:
        wanted: ``auto`` takes a real NPU where its stack is installed, else the
            simulator; ``npu`` and ``sim`` insist.

    Raises:
        RuntimeError: There is none as wanted.
    """
    runtime = find_runtime(wanted=wanted)
    os.environ.setdefault("LMCACHE_DEVICE_BACKEND", "rbln")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
    os.environ.setdefault("TORCH_RBLN_LOG_LEVEL", "ERROR")  # it logs to stdout
    if runtime.simulated:
        # Another program may hold the simulated NPUs of this user.
        if "RBLN_SIM_STATE_DIR" not in os.environ:
            _kept.append(tempfile.TemporaryDirectory(prefix="rbln-sim-"))
            os.environ["RBLN_SIM_STATE_DIR"] = _kept[-1].name
        # Third Party
        import rbln_sim

        # Where torch is, the caller has chosen already, as the tests do.
        if "torch" not in sys.modules:
            rbln_sim.activate()
    return runtime
