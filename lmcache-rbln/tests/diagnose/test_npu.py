# SPDX-License-Identifier: Apache-2.0
"""The runtime, the NPUs and who uses them, and RDS."""

# Standard
from pathlib import Path
from typing import Any
import json

# Third Party
import pytest

# First Party
from lmcache_rbln.diagnose.npu import ask_monitor, check_npu, check_rds, check_runtime
from lmcache_rbln.diagnose.report import FAIL, OK, SKIP, WARN
from lmcache_rbln.settings.rules import RDS_MODULE

TORCH: dict[str, Any] = {"library": "/opt/librbln.so", "simulated": False, "npus": 2}
FREE: dict[str, Any] = {"models": ["RBLN-CR03"], "uses": []}


def test_a_runtime_that_loads() -> None:
    result = check_runtime(TORCH, {})
    assert result.status == OK
    assert result.found == "librbln.so /opt/librbln.so, accepted by torch-rbln"
    assert "simulator" in check_runtime(TORCH | {"simulated": True}, {}).found


@pytest.mark.parametrize(
    ("environment", "found", "fix"),
    [
        ({}, "import torch: no librbln.so", "rebel-compiler"),
        (
            {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0: no librbln.so",
            "unset TORCH_DEVICE_BACKEND_AUTOLOAD",
        ),
    ],
)
def test_a_runtime_that_does_not(
    environment: dict[str, str], found: str, fix: str
) -> None:
    result = check_runtime({"error": "no librbln.so"}, environment)
    assert (result.status, result.found) == (FAIL, found)
    assert fix in result.fix


def test_free_npus() -> None:
    result = check_npu(TORCH, FREE, {})
    assert result.status == OK
    assert result.found == "2 visible (RBLN-CR03), free"
    assert result.details == {"simulated": False, "visible": 2, "held": []}
    simulated = check_npu(TORCH | {"simulated": True}, FREE, {})
    assert simulated.found.startswith("2 simulated")


def test_without_a_monitor_nothing_is_claimed_about_use() -> None:
    result = check_npu(TORCH, {"error": "no rbln-smi on PATH"}, {})
    assert result.status == OK
    assert "not opened; in use? not known, no rbln-smi on PATH" in result.found
    assert result.details["held"] is None


def test_a_held_npu_is_named_with_its_holder() -> None:
    use = {"npu": 1, "pid": 4711, "command": "vllm serve"}
    result = check_npu(TORCH, FREE | {"uses": [use]}, {})
    assert result.status == WARN
    assert "in use: 1 by pid 4711 (vllm serve)" in result.found
    assert "4711" in result.fix
    assert result.details["held"] == [use]
    both = [{"npu": n, "pid": 7, "command": "x" * 99} for n in (0, 1)]
    found = check_npu(TORCH, FREE | {"uses": both}, {}).found
    assert "in use: 0, 1 by pid 7 (xxx" in found
    assert len(found) < 120


@pytest.mark.parametrize(
    ("environment", "status"),
    [
        # Another process's NPU that this environment does not see is no matter.
        ({"RBLN_VISIBLE_DEVICES": "0"}, OK),
        ({"RBLN_VISIBLE_DEVICES": " 0, 1"}, WARN),
        # torch-rbln reads the older name first.
        ({"RBLN_DEVICES": "1", "RBLN_VISIBLE_DEVICES": "0"}, WARN),
        ({"RBLN_DEVICES": ""}, WARN),
    ],
)
def test_only_visible_npus_count(environment: dict[str, str], status: str) -> None:
    uses = [{"npu": 1, "pid": 4711, "command": "vllm serve"}]
    assert check_npu(TORCH, FREE | {"uses": uses}, environment).status == status


def test_no_npu() -> None:
    result = check_npu(TORCH | {"npus": 0}, FREE, {"RBLN_VISIBLE_DEVICES": "seven"})
    assert result.status == FAIL
    assert result.found == "no NPU is visible with RBLN_VISIBLE_DEVICES=seven"
    assert "rbln-smi" in result.fix
    assert check_npu({"error": "x"}, FREE, {}).status == SKIP


def _monitor(folder: Path, script: str) -> None:
    program = folder / "rbln-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_the_monitor_may_write_numbers_as_text(tmp_path: Path) -> None:
    context = {"ctx_id": "a", "npu": "0", "pid": "12", "cmd": "serve"}
    report = {"devices": [{"npu": "0", "name": "N"}], "contexts": [context, context]}
    _monitor(tmp_path, f"echo '{json.dumps(report)}'")
    assert ask_monitor(str(tmp_path)) == {
        "models": ["N"],
        "uses": [{"npu": 0, "pid": 12, "command": "serve"}],
    }


def test_a_monitor_that_fails_or_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def error() -> str:
        return str(ask_monitor(str(tmp_path))["error"])

    assert error() == "no rbln-smi on PATH"
    _monitor(tmp_path, "echo broken driver >&2; exit 3")
    assert "broken driver" in error()
    for text in ("", "[]", '{"devices": [{}]}', "null", "<x>"):
        _monitor(tmp_path, f"echo '{text}'")
        assert "unknown form" in error()
    monkeypatch.setattr("lmcache_rbln.diagnose.npu._TIMEOUT_S", 0.2)
    _monitor(tmp_path, "exec sleep 30")
    assert "no answer" in error()
    (tmp_path / "rbln-smi").write_text("not a program")
    assert "can't start" in error()


def test_direct_storage_is_needed_only_by_settings_that_name_it() -> None:
    used = {"RDSBackend": RDS_MODULE}
    for plugins in ({}, used):
        result = check_rds({"devices": 2}, plugins)
        assert (result.status, result.found) == (OK, "2 devices")
    for facts, found in (
        ({"error": "No module named 'rebel'"}, "No module named 'rebel'"),
        ({"devices": 0}, "no device is available"),
    ):
        result = check_rds(facts, used)
        assert (result.status, result.found) == (FAIL, found)
        assert "systemctl status rebellions-rds-binding.service" in result.fix
        assert check_rds(facts, {"Other": "other.module"}).status == SKIP
