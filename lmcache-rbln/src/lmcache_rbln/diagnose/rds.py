# SPDX-License-Identifier: Apache-2.0
"""Rebellions Direct Storage: its service and its devices."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping
from typing import Any
import shutil

# Local
from lmcache_rbln.diagnose.command import run_command
from lmcache_rbln.diagnose.result import Result, fail, ok, one_line, skip
from lmcache_rbln.settings.plugins import RDS_MODULE

SERVICE = "rebellions-rds-binding.service"
_TIMEOUT_S = 5.0


def service_state(path: str | None) -> str | None:
    """Return what systemd says about the service, or None without systemd.

    Args:
        path: The ``PATH`` to look for ``systemctl`` in.
    """
    program = shutil.which("systemctl", path=path)
    if program is None:
        return None
    # In a container without systemd running it complains on stderr only.
    state = run_command([program, "is-active", SERVICE], _TIMEOUT_S)
    return one_line(state.output, 40) or None


def check_rds(
    facts: Mapping[str, Any], service: str | None, plugins: Mapping[str, str | None]
) -> Result:
    """Check that RDS can be used, if the settings ask for it.

    Args:
        facts: The topic ``rds`` of the runtime probe.
        service: What systemd says about the service; None if that is not known.
        plugins: Module of each storage plugin in the settings.
    """
    name = "RDS"
    wanted_by = [p for p, module in plugins.items() if module == RDS_MODULE]
    state = f"{SERVICE}: {service or 'no systemd to ask'}"
    devices = int(facts.get("devices") or 0)
    problem = one_line(facts.get("error") or "")
    if not problem and not facts.get("available"):
        problem = "rds.is_available() is False"
    elif not problem and not devices:
        problem = "no device"
    if not problem and service not in (None, "active"):
        problem = "the service does not run"
    if not problem:
        return ok(name, f"{devices} devices; {state}", devices=devices, service=service)
    if not wanted_by:
        return skip(name, "not used by the settings", problem=problem)
    return fail(
        name,
        f"{problem}; {state}",
        f"NVMe devices for the storage plugin {wanted_by[0]}",
        f"systemctl status {SERVICE}; journalctl -u {SERVICE} -b",
        devices=devices,
        service=service,
    )
