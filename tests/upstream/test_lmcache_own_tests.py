# SPDX-License-Identifier: Apache-2.0
"""LMCache's own RBLN tests, and the list of those of its tests that are known to fail.

Only files that use the backend through its public names are run. The others import
modules or functions of LMCache's own backend, which this one does not have.
"""

# Future
from __future__ import annotations

# Standard
from pathlib import Path
import ast
import subprocess
import sys

# Third Party
import pytest

# First Party
from tests.upstream import known_failures, suites

FOLDER = "tests/v1/platform/devices/rbln"
BACKEND = "lmcache.v1.platform.devices.rbln"
PUBLIC = {BACKEND, f"{BACKEND}.device_ops"}
#: What this repository knows about them, so that a file can't drop out unseen.
RUN = {"test_rbln_device_transfer.py", "test_rbln_support.py"}
NOT_RUN = {
    "test_rbln_kv_layout.py": {f"{BACKEND}.kv_layout"},
    "test_rbln_kv_ops.py": {f"{BACKEND}.kv_layout"},
    "test_staging_concurrency.py": {f"{BACKEND}.kv_ops"},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tests of the installed LMCache are, outside of this checkout."""
    if not suites.sdist().is_file():
        pytest.skip("no LMCache sdist here: `make setup` downloads it")
    return suites.unpack(tmp_path_factory.mktemp("lmcache"))


def internals(path: Path) -> set[str]:
    """Return the modules of the stock backend's inside that a test file imports."""
    imported = {
        node.module
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
    }
    return {name for name in imported if name.startswith(BACKEND)} - PUBLIC


def test_every_file_is_accounted_for(root: Path) -> None:
    found = {path.name: internals(path) for path in (root / FOLDER).glob("test_*.py")}
    assert {name for name, modules in found.items() if not modules} == RUN
    assert {name: modules for name, modules in found.items() if modules} == NOT_RUN


@pytest.mark.npu
@pytest.mark.parametrize("name", sorted(RUN))
def test_it_passes(name: str, root: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", suites.__name__, f"{FOLDER}/{name}"],
        cwd=suites.ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    # A skipped test has shown nothing.
    assert "skipped" not in run.stdout, run.stdout
    assert " passed" in run.stdout


def test_what_is_known_to_fail_is_there(root: Path) -> None:
    files = {file.relative_to(root).as_posix() for file in root.rglob("test_*.py")}
    assert set(known_failures.NOT_IMPORTED) <= files
    listed = known_failures.FAILS | known_failures.FAILS_UNDER_LOAD
    for pattern, reason in listed.items():
        name, _, test = pattern.partition("::")
        [file] = [f for f in files if f.endswith(name.removeprefix("*"))]
        function = test.rpartition("::")[2].partition("[")[0].rstrip("*")
        assert f"def {function}" in (root / file).read_text(encoding="utf-8"), pattern
        assert reason
