# SPDX-License-Identifier: Apache-2.0
"""The NPU runtime, the NPUs and RDS, as far as they show without being opened."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
import ctypes
import json
import shutil

# Local
from lmcache_rbln.diagnose.probe import run_command
from lmcache_rbln.diagnose.report import FAIL, OK, SKIP, WARN, Result, one_line
from lmcache_rbln.settings.rules import RDS_MODULE

# The driver's monitor and its older name. They show who uses an NPU and open none.
_MONITORS = ("rbln-smi", "rbln-stat")
_TIMEOUT_S = 10.0
# torch-rbln reads the older name first.
_VISIBLE = ("RBLN_DEVICES", "RBLN_VISIBLE_DEVICES")
# The simulator of this project exports it for its own check of its settings.
_SIMULATOR_SYMBOL = "rbln_sim_check"
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def ask_monitor(path: str | None) -> dict[str, Any]:
    """Ask the driver's monitor, if there is one, who uses which NPU.

    Args:
        path: The ``PATH`` to look for it in.

    Returns:
        ``models``, and ``uses``: ``npu``, ``pid`` and ``command`` of each process at
        each NPU; or ``error``.
    """
    program = next(filter(None, (shutil.which(m, path=path) for m in _MONITORS)), None)
    if program is None:
        return {"error": f"no {_MONITORS[0]} on PATH"}
    output, problem = run_command([program, "-j"], _TIMEOUT_S)
    if problem:
        return {"error": one_line(f"{program}: {problem}")}
    try:
        report = json.loads(output)
        # Numbers may be texts, as releases differ; a process has several contexts.
        uses = {
            (int(c["npu"]), int(c["pid"]), str(c.get("process") or c.get("cmd")))
            for c in report.get("contexts") or ()
        }
        models = sorted({str(device["name"]) for device in report["devices"]})
    except (ValueError, KeyError, TypeError, AttributeError):
        return {"error": "the driver's monitor answered in an unknown form"}
    named = [dict(zip(("npu", "pid", "command"), u, strict=True)) for u in sorted(uses)]
    return {"models": models, "uses": named}


def examine_torch() -> dict[str, Any]:
    """Import torch as a server would, and count the NPUs; runs in a probe.

    torch-rbln itself finds librbln.so and compares its ABI. Nothing opens an NPU.

    Returns:
        ``library``, whether it is ``simulated``, and the number of ``npus``.
    """
    # Third Party
    import torch

    rbln = getattr(torch, "rbln", None)
    if rbln is None:
        return {"error": "torch did not load torch-rbln"}
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").split()
    library = next(word for word in maps if word.endswith("/librbln.so"))
    is_simulated = hasattr(ctypes.CDLL(library), _SIMULATOR_SYMBOL)
    npus = 0
    with suppress(Exception):  # a malformed setting
        npus = int(rbln.physical_device_count()) if rbln.is_available() else 0
    return {"library": library, "simulated": is_simulated, "npus": npus}


def check_runtime(torch: Mapping[str, Any], environment: Mapping[str, str]) -> Result:
    """Check that torch loads torch-rbln, and that its runtime.

    Args:
        torch: The topic ``torch`` of the runtime probe.
        environment: The environment the probe ran in.
    """
    if error := torch.get("error"):
        wanted = "torch that loads torch-rbln, and a librbln.so of its ABI"
        fix = "install the rebel-compiler that belongs to this torch-rbln; "
        fix += "TORCH_RBLN_DIAGNOSE=1 python -m torch_rbln.diagnose tells more"
        found = f"import torch: {error}"
        if environment.get(_AUTOLOAD, "1") != "1":
            found = f"{_AUTOLOAD}={environment[_AUTOLOAD]}: {error}"
            fix = f"unset {_AUTOLOAD}"
        return Result(FAIL, one_line(found, 400), wanted, fix)
    simulated = bool(torch.get("simulated"))
    kind = "simulator" if simulated else "librbln.so"
    found = f"{kind} {torch.get('library')}, accepted by torch-rbln"
    return Result(OK, found, details={"simulated": simulated})


def check_npu(
    torch: Mapping[str, Any], monitor: Mapping[str, Any], environment: Mapping[str, str]
) -> Result:
    """Check that there is an NPU and tell who uses it. None is opened.

    Args:
        torch: The topic ``torch`` of the runtime probe.
        monitor: What :func:`ask_monitor` returned.
        environment: The environment the probe ran in.
    """
    if torch.get("error"):
        return Result(SKIP, "not looked for: the RBLN runtime can't be used")
    limit = next((name for name in _VISIBLE if environment.get(name, "").strip()), "")
    npus = int(torch.get("npus") or 0)
    if not npus:
        where = f" with {limit}={environment[limit]}" if limit else ""
        fix = f"check the driver with rbln-smi{f', and {limit}' if limit else ''}"
        return Result(FAIL, f"no NPU is visible{where}", "at least one", fix)
    simulated = bool(torch.get("simulated"))
    text = f"{npus} {'simulated' if simulated else 'visible'}"
    details = {"simulated": simulated, "visible": npus, "held": monitor.get("uses")}
    if monitor.get("error"):
        # Opening one would tell, and would take it from who needs it.
        found = f"{text}, not opened; in use? not known, {monitor['error']}"
        return Result(OK, found, details=details)
    text += f" ({', '.join(monitor['models'])})"
    visible = [part.strip() for part in environment.get(limit, "").split(",")]
    held = [one for one in monitor["uses"] if not limit or str(one["npu"]) in visible]
    details["held"] = held
    if not held:
        return Result(OK, f"{text}, free", details=details)
    by_process: dict[int, list[str]] = {}
    for one in held:
        by_process.setdefault(one["pid"], []).append(str(one["npu"]))
    commands = {one["pid"]: one_line(one["command"], 60) for one in held}
    who = "; ".join(
        f"{', '.join(numbers)} by pid {pid} ({commands[pid]})"
        for pid, numbers in by_process.items()
    )
    return Result(
        WARN,
        one_line(f"{text}, in use: {who}", 300),
        "free NPUs, unless that is your server: one process owns an NPU",
        f"end pid {', '.join(map(str, sorted(by_process)))}, or choose other NPUs with "
        "RBLN_VISIBLE_DEVICES",
        details,
    )


def examine_rds() -> dict[str, Any]:
    """Ask the vendor's direct storage for its ``devices``; runs in a probe."""
    # Third Party
    from rebel import rds

    return {"devices": int(rds.is_available() and rds.query_available_device_count())}


def check_rds(facts: Mapping[str, Any], plugins: Mapping[str, str | None]) -> Result:
    """Check that RDS can be used, if the settings ask for it.

    Args:
        facts: What :func:`examine_rds` returned, or ``error``.
        plugins: Module of each storage plugin in the settings.
    """
    devices = int(facts.get("devices") or 0)
    if devices:
        return Result(OK, f"{devices} devices", details={"devices": devices})
    if RDS_MODULE not in plugins.values():
        return Result(SKIP, "not used by the settings")
    found = one_line(facts.get("error") or "no device is available")
    wanted = "NVMe devices for the storage plugin of RDS"
    service = "rebellions-rds-binding.service"
    fix = f"systemctl status {service}; journalctl -u {service} -b"
    return Result(FAIL, found, wanted, fix)
