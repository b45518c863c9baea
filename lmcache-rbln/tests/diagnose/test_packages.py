# SPDX-License-Identifier: Apache-2.0
"""Versions against what the packages' own metadata ask for."""

# Standard
from pathlib import Path
import sys

# Third Party
import pytest

# First Party
from lmcache_rbln.diagnose.packages import (
    STACK,
    check_build,
    check_package,
    installed,
)
from lmcache_rbln.diagnose.report import FAIL, OK, SKIP

GOOD: dict[str, tuple[str, tuple[str, ...]]] = {
    "torch": ("2.13.0+cpu", ()),
    "torch-rbln": (
        "0.12.0",
        (
            "torch==2.13.0+cpu",
            "scipy>=1.14.0",
            "rebel-compiler<0.12.1,>=0.12.0; extra == 'runtime'",
        ),
    ),
    "rebel-compiler": ("0.12.0", ()),
    "vllm": ("0.30.0+cpu", ()),
    "vllm-rbln": (
        "0.12.0",
        (
            "vllm==0.30.0+cpu",
            "torch",
            "torch_rbln<0.12.1,>=0.12.0; python_version >= '3'",
            "torch==1; sys_platform == 'plan9'",
            "lmcache-rbln<0.12.1,>=0.12.0; extra == 'kv-connectors'",
            "torch==3; extra == 'test'",
        ),
    ),
    "lmcache": ("0.5.6+rbln", ("torch",)),
    "lmcache-rbln": ("0.12.0", ("lmcache>=0.5.6,<=0.5.7rc2",)),
}


def test_a_stack_that_fits() -> None:
    for name in STACK:
        result = check_package(name, GOOD, simulated=False)
        assert (result.status, result.found) == (OK, GOOD[name][0])


def test_the_installed_stack_fits_by_its_own_metadata() -> None:
    packages = installed()
    for name in STACK:
        result = check_package(name, packages, simulated=True)
        assert result.status == (OK if name in packages else SKIP), result


@pytest.mark.parametrize(
    ("name", "version", "wanted", "fix"),
    [
        ("torch", "2.13.0", "torch==2.13.0+cpu (torch-rbln 0.12.0)", "pytorch.org/whl"),
        ("torch-rbln", "0.13.0", "torch-rbln<0.12.1,>=0.12.0", "torch-rbln<0.12.1"),
        ("rebel-compiler", "0.11.9", "(torch-rbln 0.12.0)", "RBLN package index"),
        ("vllm", "0.30.1+cpu", "vllm==0.30.0+cpu (vllm-rbln 0.12.0)", "vllm==0.30.0"),
        (
            "lmcache",
            "0.5.8+rbln",
            "lmcache<=0.5.7rc2,>=0.5.6 (lmcache-rbln",
            "lmcache==0.5.6+rbln",
        ),
        ("lmcache", "0.5.6", "local version +rbln", "lmcache==0.5.6+rbln --find-links"),
        ("lmcache-rbln", "0.12.1", "lmcache-rbln<0.12.1,>=0.12.0", "lmcache-rbln<"),
    ],
)
def test_a_version_that_does_not_fit(
    name: str, version: str, wanted: str, fix: str
) -> None:
    packages = GOOD | {name: (version, GOOD[name][1])}
    result = check_package(name, packages, simulated=False)
    assert result.status == FAIL
    assert version in result.found
    assert wanted in result.wanted
    assert fix in result.fix


@pytest.mark.parametrize("name", STACK)
def test_a_missing_package(name: str) -> None:
    rest = {one: GOOD[one] for one in STACK if one != name}
    result = check_package(name, rest, simulated=False)
    assert (result.status, result.found) == (FAIL, "not installed")
    assert name in result.wanted
    assert "pip install" in result.fix
    # A simulator takes the place of the runtime only.
    result = check_package(name, {}, simulated=True)
    assert result.status == (SKIP if name == "rebel-compiler" else FAIL)


def test_broken_metadata_is_a_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("torch", ""), ("vllm", None)):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        if text is not None:
            (folder / "METADATA").write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("torch", "vllm"):
        assert check_package(name, installed(), simulated=True).status == FAIL


BUILD = {
    "torch": "2.13.0+cpu",
    "built_for": "2.13.0+cpu",
    "loaded": ["lmcache_native"],
    "broken": {},
}


def test_a_build_that_loads() -> None:
    result = check_build(BUILD)
    assert result.status == OK
    assert "2.13.0+cpu" in result.found


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"error": "OSError: broken"}, "OSError: broken"),
        ({"torch": "2.12.0"}, "built for torch 2.13.0+cpu, torch 2.12.0 is installed"),
        ({"broken": {"lmcache_native": "ImportError: undefined symbol"}}, "undefined"),
        ({"loaded": []}, "no native extension"),
        ({"built_for": None}, "no record of the torch"),
    ],
)
def test_a_build_that_does_not_load(change: dict[str, object], found: str) -> None:
    result = check_build(BUILD | change)
    assert result.status == FAIL
    assert found in result.found
    assert "+rbln" in result.fix
