# SPDX-License-Identifier: Apache-2.0
"""LMCache's own RBLN tests, taken from the pinned sdist and run as they are.

Only files that use the backend through its public names are run. The others import
modules or functions of LMCache's own backend, which this one does not have.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
import ast
import os
import subprocess
import sys
import tarfile

# Third Party
import pytest

ROOT = Path(__file__).resolve().parents[2]
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The RBLN tests of the pinned LMCache, outside of this checkout."""
    given = os.environ.get("LMCACHE_SDIST", "")
    release = metadata.version("lmcache").split("+")[0]
    kept = ROOT / "build/cache/sdist" / f"lmcache-{release}.tar.gz"
    sdist = Path(given) if given else kept
    if not sdist.is_file():
        pytest.skip("no LMCache sdist here: `make setup` downloads it")
    target = tmp_path_factory.mktemp("lmcache")
    with tarfile.open(sdist) as archive:
        members = [m for m in archive.getmembers() if f"/{FOLDER}/" in m.name]
        archive.extractall(target, members, filter="data")
    yield next(target.glob(f"*/{FOLDER}"))


def internals(path: Path) -> set[str]:
    """Return the modules of the stock backend's inside that a test file imports."""
    imported = {
        node.module
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
    }
    return {name for name in imported if name.startswith(BACKEND)} - PUBLIC


def test_every_file_is_accounted_for(folder: Path) -> None:
    found = {path.name: internals(path) for path in folder.glob("test_*.py")}
    assert {name for name, modules in found.items() if not modules} == RUN
    assert {name: modules for name, modules in found.items() if modules} == NOT_RUN


@pytest.mark.npu
@pytest.mark.parametrize("name", sorted(RUN))
def test_it_passes(folder: Path, name: str, tmp_path: Path) -> None:
    report = folder / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", str(folder), "--junitxml", str(report)]
    settings = {k: v for k, v in os.environ.items() if k != "LMCACHE_DEVICE_BACKEND"}
    # A simulated machine of its own: this process may hold the NPUs of the other one.
    settings["RBLN_SIM_STATE_DIR"] = str(tmp_path)
    run = subprocess.run(
        [*command, str(folder / name)],
        env=settings,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    # A skipped test has shown nothing.
    assert "skipped" not in run.stdout, run.stdout
    assert " passed" in run.stdout
