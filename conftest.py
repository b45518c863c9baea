# SPDX-License-Identifier: Apache-2.0
"""Chooses the NPU that the tests of this repository run on.

``--runtime auto`` (default) takes a real NPU where one can be opened, else the
simulator; ``sim`` and ``npu`` insist. Without either, tests that need a device skip
and say why. The choice is made before anything imports torch, since torch-rbln binds
to its runtime then.
"""

# Standard
from importlib import metadata, util
import os
import subprocess
import sys
import tempfile

# Third Party
from hypothesis import HealthCheck, settings
import pytest

# The same examples in every run, however slow the machine is. Others are tried with
# --hypothesis-profile=default.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

_OPEN_AN_NPU = (
    "import torch; torch.rbln.synchronize(); "
    "print(torch.rbln.get_device_name(0), torch.rbln.device_count())"
)
_header = pytest.StashKey[str]()
_missing = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--runtime",
        choices=("auto", "sim", "npu"),
        default="auto",
        help="NPU to test on: a real one, the simulator, or whichever there is",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "npu: needs an NPU, real or simulated")
    config.addinivalue_line("markers", "sim: needs the simulator itself")
    wanted = config.getoption("--runtime")
    reason = ""
    if wanted in ("auto", "npu"):
        real, reason = _open_real_npu()
        if real:
            config.stash[_header] = f"NPU ({real})"
            config.stash[_missing] = ""
            return
    # Where a real NPU may be, the simulator is no substitute, and refuses to start.
    if wanted == "sim" or (wanted == "auto" and not _is_npu_host()):
        if util.find_spec("rbln_sim") is not None:
            # Third Party
            import rbln_sim

            # Two devices, so that a wrong device index shows, in a machine of its own:
            # another program on this one may hold the simulated NPUs of its user.
            os.environ.setdefault("RBLN_SIM_DEVICES", "2")
            state = tempfile.TemporaryDirectory(prefix="rbln-sim-")
            config.add_cleanup(state.cleanup)
            os.environ.setdefault("RBLN_SIM_STATE_DIR", state.name)
            try:
                rbln_sim.activate()
            except RuntimeError as error:
                raise pytest.UsageError(f"--runtime {wanted}: {error}") from error
            config.stash[_header] = "simulated NPU (rbln-sim)"
            config.stash[_missing] = ""
            return
        reason = f"{reason}; rbln-sim is not installed".lstrip("; ")
    if wanted != "auto":
        raise pytest.UsageError(f"--runtime {wanted}: {reason}")
    # A torch-rbln without a runtime would make `import torch` itself fail.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    config.stash[_header] = f"none ({reason})"
    config.stash[_missing] = f"no NPU: {reason}"


def pytest_report_header(config: pytest.Config) -> str:
    return f"RBLN runtime: {config.stash[_header]}"


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    simulated = config.stash[_header].startswith("simulated")
    for item in items:
        if item.get_closest_marker("npu") and config.stash[_missing]:
            item.add_marker(pytest.mark.skip(reason=config.stash[_missing]))
        if item.get_closest_marker("sim") and not simulated:
            item.add_marker(pytest.mark.skip(reason="tests the simulator itself"))


def _is_npu_host() -> bool:
    """Whether the stack of a real NPU is installed."""
    try:
        metadata.version("rebel-compiler")
    except metadata.PackageNotFoundError:
        return False
    return True


def _open_real_npu() -> tuple[str, str]:
    """Return a real NPU's name, or the reason why none can be opened."""
    if not _is_npu_host():
        return "", "rebel-compiler is not installed"
    probe = subprocess.run(
        [sys.executable, "-c", _OPEN_AN_NPU], capture_output=True, text=True
    )
    if probe.returncode:
        said = probe.stderr.strip().splitlines() or ["it did not say why"]
        # The runtime's own line, if any, tells more than the exception behind it.
        held = [line for line in said if "held by" in line]
        return "", f"no NPU can be opened: {(held or said[-1:])[0]}"
    return probe.stdout.strip(), ""
