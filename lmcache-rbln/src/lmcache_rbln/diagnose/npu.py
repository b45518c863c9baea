# SPDX-License-Identifier: Apache-2.0
"""The NPU runtime and the NPUs, as far as they show without being opened."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
import json
import shutil

# Local
from lmcache_rbln.diagnose.command import run_command
from lmcache_rbln.diagnose.result import Result, fail, ok, one_line, skip, warn

# The driver's monitor and its older name. They show who uses an NPU and open none.
_MONITORS = ("rbln-smi", "rbln-stat")
_MONITOR_TIMEOUT_S = 10.0
# torch-rbln reads the older name first.
_VISIBLE = ("RBLN_DEVICES", "RBLN_VISIBLE_DEVICES")
_COMMAND = 60  # characters of a command line that are shown
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


@dataclass(frozen=True)
class Holder:
    """A process that uses an NPU."""

    npu: int
    pid: int
    command: str


@dataclass(frozen=True)
class Monitor:
    """What the driver's monitor shows.

    Attributes:
        names: Model of each NPU of the machine, by number.
        holders: Processes that use one.
        problem: Why nothing is known, or empty.
    """

    names: Mapping[int, str]
    holders: Sequence[Holder] = ()
    problem: str = ""


def read_monitor(path: str | None) -> Monitor:
    """Ask the driver's monitor, if there is one, who uses which NPU.

    Args:
        path: The ``PATH`` to look for it in.
    """
    program = next(filter(None, (shutil.which(m, path=path) for m in _MONITORS)), None)
    if program is None:
        return Monitor({}, problem=f"no {_MONITORS[0]} on PATH")
    ended = run_command([program, "-j"], _MONITOR_TIMEOUT_S)
    if ended.problem or ended.code:
        why = ended.problem or ended.errors or ended.output or f"exit code {ended.code}"
        return Monitor({}, problem=one_line(f"{program}: {why}"))
    return parse_monitor(ended.output)


def parse_monitor(text: str) -> Monitor:
    """Read the monitor's JSON; numbers may be strings, as releases differ."""
    try:
        report = json.loads(text)
        names = {int(d["npu"]): str(d.get("name", "")) for d in report["devices"]}
        holders = [
            Holder(
                int(context["npu"]),
                int(context["pid"]),
                str(context.get("process") or context.get("cmd") or "?"),
            )
            for context in report.get("contexts") or ()
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return Monitor({}, problem="the driver's monitor answered in an unknown form")
    # A process can have several contexts on an NPU.
    return Monitor(names, list(dict.fromkeys(holders)))


def check_runtime(
    library: Mapping[str, Any], torch: Mapping[str, Any], environment: Mapping[str, str]
) -> Result:
    """Check that torch-rbln finds its runtime and that both are of one ABI.

    Args:
        library: The topic ``library`` of the runtime probe.
        torch: Its topic ``torch``.
        environment: The environment the probe ran in.
    """
    name = "RBLN runtime"
    install = (
        "install the rebel-compiler that belongs to this torch-rbln, or put the folder "
        "of librbln.so on LD_LIBRARY_PATH"
    )
    if library.get("error"):
        return fail(
            name, one_line(library["error"]), "a librbln.so that loads", install
        )
    if library.get("abi_problem"):
        wanted = f"a librbln.so that accepts ABI {library.get('built_abi')}"
        return fail(name, one_line(library["abi_problem"], 400), wanted, install)
    kind = "simulator" if library.get("simulated") else "librbln.so"
    where = f"{kind} {library.get('path')}"
    if torch.get("error"):
        if environment.get(_AUTOLOAD, "1") != "1":
            shown = f"{_AUTOLOAD}={environment[_AUTOLOAD]}: {torch['error']}"
            wanted = "torch that loads torch-rbln"
            return fail(name, shown, wanted, f"unset {_AUTOLOAD}")
        return fail(
            name,
            one_line(f"import torch: {torch['error']}"),
            "import torch that succeeds",
            "TORCH_RBLN_DIAGNOSE=1 python -m torch_rbln.diagnose tells more",
        )
    window = library.get("abi")
    if not window or not library.get("built_abi"):
        why = library.get("abi_unread") or "torch-rbln or librbln.so has no ABI number"
        return warn(
            name, f"{where}; ABI not compared: {why}", "an ABI that fits", install
        )
    return ok(
        name,
        f"ABI {library['built_abi']} in [{window[0]}, {window[1]}]; {where}",
        simulated=bool(library.get("simulated")),
    )


def visible_npus(environment: Mapping[str, str]) -> tuple[str, list[int]] | None:
    """Return the variable that limits the visible NPUs and their numbers.

    Returns:
        None if nothing limits them; an empty list for what isn't a list of numbers.
    """
    for variable in _VISIBLE:
        text = environment.get(variable, "").strip()
        if not text:
            continue
        try:
            return variable, [int(part) for part in text.split(",")]
        except ValueError:
            return variable, []
    return None


def _uses(holders: Sequence[Holder]) -> list[str]:
    """Return a text for each process, with all its NPUs."""
    npus: dict[tuple[int, str], list[str]] = {}
    for holder in holders:
        npus.setdefault((holder.pid, holder.command), []).append(str(holder.npu))
    return [
        f"{', '.join(numbers)} by pid {pid} ({one_line(command, _COMMAND)})"
        for (pid, command), numbers in npus.items()
    ]


def check_npu(
    torch: Mapping[str, Any],
    simulated: bool,
    monitor: Monitor,
    environment: Mapping[str, str],
) -> Result:
    """Check that there is an NPU and tell who uses it. None is opened.

    Args:
        torch: The topic ``torch`` of the runtime probe.
        simulated: Whether the runtime is a simulator.
        monitor: What the driver's monitor shows.
        environment: The environment the probe ran in.
    """
    name = "NPU"
    if torch.get("error"):
        return skip(name, "not looked for: the RBLN runtime can't be used")
    limit = visible_npus(environment)
    shown = f"{limit[0]}={environment[limit[0]]}" if limit else ""
    count = int(torch.get("physical") or torch.get("logical") or 0)
    if not torch.get("available") or not count:
        return fail(
            name,
            f"no NPU is visible{f' with {shown}' if shown else ''}",
            "at least one",
            f"check the driver with rbln-smi{f', and {limit[0]}' if limit else ''}",
            reason=torch.get("reason"),
        )
    models = ", ".join(sorted({n for n in monitor.names.values() if n}))
    text = f"{count} {'simulated' if simulated else 'visible'}"
    text += f" ({models})" if models else ""
    if monitor.problem:
        # Opening one would tell, and would take it from who needs it.
        return ok(
            name,
            f"{text}, not opened; in use? not known, {monitor.problem}",
            simulated=simulated,
            visible=count,
            held=None,
        )
    held = [h for h in monitor.holders if limit is None or h.npu in limit[1]]
    if held:
        who = "; ".join(_uses(held))
        return warn(
            name,
            one_line(f"{text}, in use: {who}", 300),
            "free NPUs, unless that is your server: one process owns an NPU",
            f"end pid {', '.join(str(p) for p in sorted({h.pid for h in held}))}, or "
            "choose other NPUs with RBLN_VISIBLE_DEVICES",
            simulated=simulated,
            visible=count,
            held=[{"npu": h.npu, "pid": h.pid, "command": h.command} for h in held],
        )
    return ok(name, f"{text}, free", simulated=simulated, visible=count, held=[])
