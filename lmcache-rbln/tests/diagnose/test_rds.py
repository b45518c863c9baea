# SPDX-License-Identifier: Apache-2.0
"""Direct storage: needed only by settings that name it."""

# Future
from __future__ import annotations

# Standard
from pathlib import Path
from typing import Any

# Third Party
import pytest

# First Party
from lmcache_rbln.diagnose.rds import check_rds, service_state
from lmcache_rbln.diagnose.result import Status
from lmcache_rbln.settings.plugins import RDS_MODULE

READY: dict[str, Any] = {"available": True, "devices": 2}
USED = {"RDSBackend": RDS_MODULE}


@pytest.mark.parametrize("service", ["active", None])
@pytest.mark.parametrize("plugins", [{}, USED])
def test_devices_that_are_ready(service: str | None, plugins: dict[str, Any]) -> None:
    result = check_rds(READY, service, plugins)
    assert result.status is Status.OK
    assert "2 devices" in result.found
    assert (service or "no systemd to ask") in result.found


@pytest.mark.parametrize(
    ("facts", "service", "found"),
    [
        ({"error": "No module named 'rebel'"}, None, "No module named 'rebel'"),
        ({"available": False, "devices": 0}, "active", "is_available() is False"),
        ({"available": True, "devices": 0}, "active", "no device"),
        (READY, "inactive", "the service does not run"),
        (READY, "failed", "service: failed"),
    ],
)
def test_what_is_missing_fails_only_where_it_is_used(
    facts: dict[str, Any], service: str | None, found: str
) -> None:
    result = check_rds(facts, service, USED)
    assert result.status is Status.FAIL
    assert found in result.found
    assert "systemctl status rebellions-rds-binding.service" in result.fix
    assert "RDSBackend" in result.wanted
    assert check_rds(facts, service, {"Other": "other.module"}).status is Status.SKIP


def test_what_systemd_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert service_state(str(tmp_path)) is None
    program = tmp_path / "systemctl"
    program.write_text(
        '#!/bin/sh\n[ "$*" = "is-active rebellions-rds-binding.service" ] || exit 9\n'
        "echo inactive; exit 3\n"
    )
    program.chmod(0o755)
    assert service_state(str(tmp_path)) == "inactive"
    program.write_text("#!/bin/sh\necho 'no systemd here' >&2; exit 1\n")
    assert service_state(str(tmp_path)) is None
    program.write_text("#!/bin/sh\nexec sleep 30\n")
    monkeypatch.setattr("lmcache_rbln.diagnose.rds._TIMEOUT_S", 0.2)
    assert service_state(str(tmp_path)) is None
