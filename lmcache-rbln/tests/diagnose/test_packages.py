# SPDX-License-Identifier: Apache-2.0
"""Versions against what the packages' own metadata ask for."""

# Future
from __future__ import annotations

# Standard
from pathlib import Path
import sys

# Third Party
import pytest

# First Party
from lmcache_rbln.diagnose.packages import (
    STACK,
    Package,
    check_build,
    check_package,
    installed,
    wishes,
)
from lmcache_rbln.diagnose.result import Status

GOOD = {
    "torch": Package("2.13.0+cpu"),
    "torch-rbln": Package(
        "0.12.0",
        (
            "torch==2.13.0+cpu",
            "scipy>=1.14.0",
            "rebel-compiler<0.12.1,>=0.12.0; extra == 'runtime'",
        ),
    ),
    "rebel-compiler": Package("0.12.0"),
    "vllm": Package("0.30.0+cpu"),
    "vllm-rbln": Package(
        "0.12.0",
        (
            "vllm==0.30.0+cpu",
            "torch",
            "torch_rbln<0.12.1,>=0.12.0; python_version >= '3'",
            "torch==1; sys_platform == 'plan9'",
            "not a requirement at all",
            "lmcache-rbln<0.12.1,>=0.12.0; extra == 'kv-connectors'",
            "torch==3; extra == 'test'",
        ),
    ),
    "lmcache": Package("0.5.6+rbln", ("torch",)),
    "lmcache-rbln": Package("0.12.0", ("lmcache>=0.5.6,<=0.5.7rc2",)),
}


@pytest.mark.parametrize("name", STACK)
def test_a_stack_that_fits(name: str) -> None:
    result = check_package(name, GOOD)
    assert (result.status, result.found) == (Status.OK, GOOD[name].version)


def test_the_installed_stack_fits_by_its_own_metadata() -> None:
    packages = {name: installed(name) for name in STACK}
    assert wishes("torch", packages) == [("torch-rbln 0.12.0", "==2.13.0+cpu")]
    for name in STACK:
        result = check_package(name, packages, simulated=True)
        wanted = Status.SKIP if name == "rebel-compiler" else Status.OK
        if packages[name].version:  # a real rebel-compiler
            wanted = Status.OK
        assert result.status is wanted, result


@pytest.mark.parametrize(
    ("name", "version", "wanted", "fix"),
    [
        (
            "torch",
            "2.12.1",
            "torch==2.13.0+cpu (torch-rbln 0.12.0)",
            "download.pytorch",
        ),
        (
            "torch",
            "2.13.0",
            "torch==2.13.0+cpu (torch-rbln 0.12.0)",
            "torch==2.13.0+cpu",
        ),
        ("torch-rbln", "0.13.0", "torch-rbln<0.12.1,>=0.12.0", "torch-rbln<0.12.1"),
        ("rebel-compiler", "0.11.9", "(torch-rbln 0.12.0)", "RBLN package index"),
        (
            "vllm",
            "0.30.1+cpu",
            "vllm==0.30.0+cpu (vllm-rbln 0.12.0)",
            "vllm==0.30.0+cpu",
        ),
        (
            "lmcache",
            "0.5.8+rbln",
            "lmcache<=0.5.7rc2,>=0.5.6 (lmcache-rbln 0.12.0)",
            "==0.5.6+rbln",
        ),
        ("lmcache", "0.5.6", "local version +rbln", "lmcache==0.5.6+rbln"),
        ("lmcache", "0.5.6+cu129", "local version +rbln", "--find-links"),
        ("lmcache-rbln", "0.12.1", "lmcache-rbln<0.12.1,>=0.12.0", "lmcache-rbln<"),
        ("torch", "two", "torch==2.13.0+cpu", "torch==2.13.0+cpu"),
    ],
)
def test_a_version_that_does_not_fit(
    name: str, version: str, wanted: str, fix: str
) -> None:
    packages = GOOD | {name: Package(version, GOOD[name].requires)}
    result = check_package(name, packages)
    assert result.status is Status.FAIL
    assert version in result.found
    assert wanted in result.wanted
    assert fix in result.fix


@pytest.mark.parametrize("name", STACK)
def test_a_missing_package(name: str) -> None:
    result = check_package(name, GOOD | {name: Package(None)})
    assert (result.status, result.found) == (Status.FAIL, "not installed")
    assert name in result.wanted
    assert "pip install" in result.fix


def test_a_simulator_takes_the_place_of_the_runtime_only() -> None:
    empty = {name: Package(None) for name in STACK}
    found = {n: check_package(n, empty, simulated=True).status for n in STACK}
    assert found.pop("rebel-compiler") is Status.SKIP
    assert set(found.values()) == {Status.FAIL}


def test_broken_metadata_is_a_failure_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (
        ("no_version", "Metadata-Version: 2.1\nName: no-version\n"),
        ("empty", ""),
        ("absent", None),
    ):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        if text is not None:
            (folder / "METADATA").write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("no-version", "empty", "absent"):
        package = installed(name)
        assert package.version is None
        result = check_package("torch", GOOD | {"torch": package})
        assert result.status is Status.FAIL
    assert installed("no-such-distribution") == Package(None)


BUILD = {
    "torch": "2.13.0+cpu",
    "built_for": "2.13.0+cpu",
    "loaded": ["lmcache_native"],
    "broken": {},
}


def test_a_build_that_loads() -> None:
    result = check_build(BUILD)
    assert result.status is Status.OK
    assert "2.13.0+cpu" in result.found


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"error": "import torch: OSError: broken"}, "import torch: OSError: broken"),
        ({"torch": "2.12.0"}, "built for torch 2.13.0+cpu, torch 2.12.0 is installed"),
        ({"broken": {"lmcache_native": "ImportError: undefined symbol"}}, "undefined"),
        ({"loaded": []}, "no native extension"),
        ({"built_for": None}, "no record of the torch"),
    ],
)
def test_a_build_that_does_not_load(change: dict[str, object], found: str) -> None:
    result = check_build(BUILD | change)
    assert result.status is Status.FAIL
    assert found in result.found
    assert "+rbln" in result.fix
