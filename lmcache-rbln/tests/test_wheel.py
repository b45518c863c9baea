# SPDX-License-Identifier: Apache-2.0
"""The wheel: what is in it, what it asks for, and whom it satisfies."""

# Standard
from email.parser import Parser
from importlib import metadata
from pathlib import Path
import shutil
import subprocess
import sys
import tomllib
import zipfile

# Third Party
from packaging.requirements import Requirement
import pytest

PROJECT = Path(__file__).resolve().parents[1]
ROOT = PROJECT.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built as a user would, from a copy that may be littered."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("*.egg-info", "build", "__pycache__")
    shutil.copytree(PROJECT, folder / "source", ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), "./source"]
    run = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    [built] = folder.glob("*.whl")
    return built


def test_contents(wheel: Path) -> None:
    assert wheel.name == "lmcache_rbln-0.12.0-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = PROJECT / "src"
    wanted = {
        str(path.relative_to(sources))
        for path in (sources / "lmcache_rbln").rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert "lmcache_rbln/integration/vllm/connector.py" in wanted
    assert {name for name in names if ".dist-info/" not in name} == wanted


def test_requirements(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    [name] = [n for n in archive.namelist() if n.endswith("/METADATA")]
    found = Parser().parsestr(archive.read(name).decode())
    asked = {
        wish.name: wish.specifier
        for wish in map(Requirement, found.get_all("Requires-Dist") or [])
    }
    # What the vendor's installation brought must not be replaced.
    others = {"torch", "torch-rbln", "vllm", "vllm-rbln", "numpy"}
    assert asked.keys().isdisjoint(others)
    # Neither the local label of this repository's LMCache gets in the way, nor that one
    # of the two releases is a candidate.
    pins = tomllib.loads((ROOT / "upstream.toml").read_text(encoding="utf-8"))
    for table in ("upstream", "next"):
        version = f"{pins[table]['version']}+rbln"
        assert asked["lmcache"].contains(version, prereleases=True)


def test_it_is_what_vllm_rbln_asks_for() -> None:
    wanted = [Requirement(text) for text in metadata.requires("vllm-rbln") or []]
    ours = [req for req in wanted if req.name == "lmcache-rbln"]
    assert ours
    for requirement in ours:
        assert requirement.marker is not None
        assert requirement.marker.evaluate({"extra": "kv-connectors"})
        assert requirement.specifier.contains("0.12.0")


def test_it_imports_without_vllm_or_a_device(wheel: Path) -> None:
    """As the diagnostic needs it, whatever is wrong with the rest."""
    code = "import lmcache_rbln, lmcache_rbln.settings; print(lmcache_rbln.__file__)"
    run = subprocess.run(
        [
            sys.executable,
            "-I",
            "-c",
            f"import sys; sys.path.insert(0, {str(wheel)!r}); " + code,
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert str(wheel) in run.stdout


def test_vllm_is_told_of_the_request_checks(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    [name] = [n for n in archive.namelist() if n.endswith("/entry_points.txt")]
    told = archive.read(name).decode()
    assert "[vllm.logits_processors]" in told
    assert "lmcache_rbln.integration.vllm.request_checks:RequestChecks" in told
