# SPDX-License-Identifier: Apache-2.0
"""The runtime, the NPUs, and who uses them."""

# Future
from __future__ import annotations

# Standard
from pathlib import Path
from typing import Any
import json

# Third Party
import pytest

# First Party
from lmcache_rbln.diagnose.npu import (
    Holder,
    Monitor,
    check_npu,
    check_runtime,
    parse_monitor,
    read_monitor,
    visible_npus,
)
from lmcache_rbln.diagnose.result import Status

LIBRARY: dict[str, Any] = {
    "path": "/opt/librbln.so",
    "built_abi": 6,
    "abi": [5, 7],
    "abi_problem": None,
    "simulated": False,
}
TORCH: dict[str, Any] = {"available": True, "logical": 2, "physical": 2}
FREE = Monitor({0: "RBLN-CR03", 1: "RBLN-CR03"})


def test_a_runtime_that_fits() -> None:
    result = check_runtime(LIBRARY, TORCH, {})
    assert result.status is Status.OK
    assert result.found == "ABI 6 in [5, 7]; librbln.so /opt/librbln.so"
    simulated = check_runtime(LIBRARY | {"simulated": True}, TORCH, {})
    assert "simulator" in simulated.found
    assert simulated.details == {"simulated": True}


@pytest.mark.parametrize(
    ("library", "torch", "environment", "found", "fix"),
    [
        ({"error": "Could not find librbln.so."}, {}, {}, "not find", "rebel-compiler"),
        (LIBRARY | {"abi_problem": "built for 6"}, TORCH, {}, "built for 6", "rebel-c"),
        (LIBRARY, {"error": "no symbol"}, {}, "import torch: no symbol", "diagnose"),
        (
            LIBRARY,
            {"error": "not loaded"},
            {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            "AUTOLOAD=0",
            "unset TORCH_DEVICE_BACKEND_AUTOLOAD",
        ),
    ],
)
def test_a_runtime_that_does_not(
    library: dict[str, Any],
    torch: dict[str, Any],
    environment: dict[str, str],
    found: str,
    fix: str,
) -> None:
    result = check_runtime(library, torch, environment)
    assert result.status is Status.FAIL
    assert found in result.found
    assert fix in result.fix


@pytest.mark.parametrize(
    "change", [{"abi": None}, {"built_abi": None}, {"abi_unread": "why", "abi": None}]
)
def test_an_abi_that_is_not_told_is_a_warning(change: dict[str, Any]) -> None:
    result = check_runtime(LIBRARY | change, TORCH, {})
    assert result.status is Status.WARN
    assert "ABI not compared" in result.found


def test_free_npus() -> None:
    result = check_npu(TORCH, False, FREE, {})
    assert result.status is Status.OK
    assert result.found == "2 visible (RBLN-CR03), free"
    assert result.details == {"simulated": False, "visible": 2, "held": []}
    assert check_npu(TORCH, True, FREE, {}).found.startswith("2 simulated")


def test_without_a_monitor_nothing_is_claimed_about_use() -> None:
    result = check_npu(TORCH, False, Monitor({}, problem="no rbln-smi on PATH"), {})
    assert result.status is Status.OK
    assert "not opened; in use? not known, no rbln-smi on PATH" in result.found
    assert result.details["held"] is None


def test_a_held_npu_is_named_with_its_holder() -> None:
    held = Monitor(FREE.names, [Holder(1, 4711, "vllm serve")])
    result = check_npu(TORCH, False, held, {})
    assert result.status is Status.WARN
    assert "in use: 1 by pid 4711 (vllm serve)" in result.found
    assert "4711" in result.fix
    assert result.details["held"] == [{"npu": 1, "pid": 4711, "command": "vllm serve"}]
    both = Monitor(FREE.names, [Holder(n, 7, "x" * 99) for n in (0, 1)])
    found = check_npu(TORCH, False, both, {}).found
    assert "in use: 0, 1 by pid 7 (xxx" in found
    assert len(found) < 120
    # Another process's NPU that this environment does not see is no matter.
    one = check_npu(TORCH | {"physical": 1}, False, held, {"RBLN_VISIBLE_DEVICES": "0"})
    assert one.status is Status.OK
    assert one.details["held"] == []


@pytest.mark.parametrize(
    ("torch", "environment", "found"),
    [
        ({"available": False, "logical": 0, "physical": 0}, {}, "no NPU is visible"),
        (
            {"available": 0, "logical": 0, "reason": "no driver"},
            {},
            "no NPU is visible",
        ),
        ({"reason": "no driver"}, {}, "no NPU is visible"),
        (
            {"available": False, "logical": 0, "physical": 0},
            {"RBLN_VISIBLE_DEVICES": "seven"},
            "no NPU is visible with RBLN_VISIBLE_DEVICES=seven",
        ),
    ],
)
def test_no_npu(torch: dict[str, Any], environment: dict[str, str], found: str) -> None:
    result = check_npu(torch, False, FREE, environment)
    assert result.status is Status.FAIL
    assert result.found == found
    assert "rbln-smi" in result.fix


def test_without_a_runtime_no_npu_is_looked_for() -> None:
    assert check_npu({"error": "x"}, False, FREE, {}).status is Status.SKIP


def test_the_older_variable_wins() -> None:
    assert visible_npus({"RBLN_DEVICES": "1", "RBLN_VISIBLE_DEVICES": "0"}) == (
        "RBLN_DEVICES",
        [1],
    )
    assert visible_npus({"RBLN_VISIBLE_DEVICES": " 0,2"}) == (
        "RBLN_VISIBLE_DEVICES",
        [0, 2],
    )
    assert visible_npus({"RBLN_VISIBLE_DEVICES": "a"}) == ("RBLN_VISIBLE_DEVICES", [])
    assert visible_npus({"RBLN_DEVICES": ""}) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"devices": [{}]}', "null", "<x>"])
def test_an_unknown_answer_of_the_monitor_is_no_knowledge(text: str) -> None:
    assert "unknown form" in parse_monitor(text).problem


def test_the_monitor_may_write_numbers_as_text() -> None:
    context = {"ctx_id": "a", "npu": "0", "pid": "12", "cmd": "serve"}
    report = {"devices": [{"npu": "0", "name": "N"}], "contexts": [context, context]}
    assert parse_monitor(json.dumps(report)) == Monitor(
        {0: "N"}, [Holder(0, 12, "serve")]
    )


def _monitor(folder: Path, script: str) -> None:
    program = folder / "rbln-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_a_monitor_that_fails_or_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_monitor(str(tmp_path)).problem == "no rbln-smi on PATH"
    _monitor(tmp_path, "echo broken driver >&2; exit 3")
    assert "broken driver" in read_monitor(str(tmp_path)).problem
    monkeypatch.setattr("lmcache_rbln.diagnose.npu._MONITOR_TIMEOUT_S", 0.2)
    _monitor(tmp_path, "exec sleep 30")
    assert "no answer" in read_monitor(str(tmp_path)).problem
    (tmp_path / "rbln-smi").write_text("not a program")
    assert "can't start" in read_monitor(str(tmp_path)).problem
