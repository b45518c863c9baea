# SPDX-License-Identifier: Apache-2.0
"""Which device LMCache chooses, and what it says about RBLN."""

# Standard
from types import SimpleNamespace
from unittest.mock import MagicMock
import os
import subprocess
import sys

# Third Party
import pytest

# First Party
from lmcache.v1.multiprocess.transfer_mode import MPTransferMode
from lmcache.v1.platform.devices import rbln as backend
from lmcache.v1.platform.devices.rbln import RblnDeviceSpec
from lmcache.v1.platform.devices.rbln.device_ops import RblnDeviceOps
from lmcache.v1.platform.devices.rbln.settings import STAGING_ENV_VAR, THREADS_ENV_VAR

_CHOOSE = "import lmcache; print('CHOSE', lmcache.torch_device_type)"
_WARNING = "torch-rbln is installed, but LMCache does not use RBLN"


def choose(**environment: str | None) -> tuple[str, str]:
    """Import LMCache in a new process; return the device chosen and all output."""
    settings = dict(os.environ)
    for name in ("LMCACHE_DEVICE_BACKEND", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        settings.pop(name, None)
    for name, value in environment.items():
        if value is None:
            settings.pop(name, None)
        else:
            settings[name] = value
    run = subprocess.run(
        [sys.executable, "-c", _CHOOSE],
        env=settings,
        cwd=os.sep,
        capture_output=True,
        text=True,
        timeout=600,
    )
    output = run.stdout + run.stderr
    chosen = [line for line in run.stdout.splitlines() if line.startswith("CHOSE ")]
    assert (run.returncode == 0) == bool(chosen), output
    return (chosen[0].removeprefix("CHOSE ") if chosen else ""), output


def _fail() -> bool:
    raise RuntimeError("bad RBLN_DEVICE_MAP")


def test_capabilities() -> None:
    spec = RblnDeviceSpec()
    assert (spec.device_type, spec.backend_name) == ("rbln", "rbln")
    assert spec.torch_module_name == "rbln"
    assert spec.ops_cls is RblnDeviceOps
    assert not spec.is_lmcache_driven_available()
    assert spec.default_mp_transfer_mode() is MPTransferMode.ENGINE_DRIVEN
    assert spec.ipc_wrapper_cls is None and spec.event_ipc_backend is None
    # A backend that pins would need shared memory to keep working (lazy L1).
    assert not spec.is_pin_supported


_PINNED = "LMCACHE_DEVICE_BACKEND=rbln, but "


@pytest.mark.parametrize(
    ("rbln", "installed", "message"),
    [
        (None, False, "LMCACHE_DEVICE_BACKEND=rbln, but torch_rbln is not installed"),
        (None, True, "LMCACHE_DEVICE_BACKEND=rbln, but torch did not load torch_rbln"),
        (
            SimpleNamespace(is_available=lambda: False),
            True,
            "LMCACHE_DEVICE_BACKEND=rbln, but torch.rbln sees no NPU",
        ),
        (
            SimpleNamespace(is_available=_fail),
            True,
            "LMCACHE_DEVICE_BACKEND=rbln, but torch.rbln can't be used: bad",
        ),
    ],
)
def test_pinned_it_raises_and_unpinned_it_warns_once(
    monkeypatch: pytest.MonkeyPatch, rbln: object, installed: bool, message: str
) -> None:
    warning = MagicMock()
    monkeypatch.setattr(backend.logger, "warning", warning)
    monkeypatch.setattr(RblnDeviceSpec, "_warned", False)
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    monkeypatch.setattr(
        backend.importlib.util, "find_spec", lambda name: installed or None
    )
    spec = RblnDeviceSpec()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(rbln=rbln))

    monkeypatch.setenv("LMCACHE_DEVICE_BACKEND", "rbln")
    with pytest.raises(RuntimeError) as raised:
        spec.is_available()
    assert str(raised.value).startswith(message)
    warning.assert_not_called()

    monkeypatch.delenv("LMCACHE_DEVICE_BACKEND")
    assert not spec.is_available()
    assert not spec.is_available()
    assert warning.call_count == (1 if installed else 0)
    if installed:
        assert warning.call_args.args[1].startswith(message.removeprefix(_PINNED))


@pytest.mark.npu
@pytest.mark.parametrize("pinned", [None, "rbln", " RBLN "])
def test_rbln_is_chosen(pinned: str | None) -> None:
    # Settings of transfers are nothing to a process that never makes one.
    settings = dict.fromkeys((STAGING_ENV_VAR, THREADS_ENV_VAR), "many")
    device, output = choose(LMCACHE_DEVICE_BACKEND=pinned, **settings)
    assert device == "rbln"
    assert _WARNING not in output
    assert "CLI-only mode" not in output


_NO_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
_NO_RUNTIME = {"LD_LIBRARY_PATH": None, "PYTHONPATH": None}
_NO_DEVICE = {"RBLN_SIM_DEVICES": "0"}


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (_NO_AUTOLOAD, "TORCH_DEVICE_BACKEND_AUTOLOAD=0"),
        (_NO_RUNTIME, "Could not find librbln.so"),
        # As in a program that imports torch first.
        (_NO_AUTOLOAD | _NO_RUNTIME, "Could not find librbln.so"),
        pytest.param(_NO_DEVICE, "sees no NPU", marks=pytest.mark.sim),
    ],
)
def test_the_stub_is_chosen_with_one_warning(
    environment: dict[str, str | None], reason: str
) -> None:
    pytest.importorskip("torch_rbln")
    device, output = choose(**environment)
    assert device == "cpu", output
    assert output.count(_WARNING) == 1
    assert reason in output


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (_NO_AUTOLOAD, "torch did not load torch_rbln"),
        (_NO_RUNTIME, "torch-rbln lacks its runtime. Could not find librbln.so"),
        pytest.param(_NO_DEVICE, "torch.rbln sees no NPU", marks=pytest.mark.sim),
    ],
)
def test_pinned_it_fails_with_the_reason(
    environment: dict[str, str | None], reason: str
) -> None:
    pytest.importorskip("torch_rbln")
    device, output = choose(LMCACHE_DEVICE_BACKEND="rbln", **environment)
    assert not device
    assert _PINNED + reason in output
