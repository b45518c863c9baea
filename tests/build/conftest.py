# SPDX-License-Identifier: Apache-2.0
"""What the tests of the build share: one wheel, one environment to install into."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.build.workshop import CACHE, ROOT, Checkout, Environment, with_nvcc


def required(name: str) -> set[str]:
    """Return the names in one of the requirement files of the set-up."""
    text = (ROOT / "dev" / "requirements" / name).read_text(encoding="utf-8")
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return {canonicalize_name(line.split("==")[0]) for line in lines}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A copy of this repository for one test."""
    return Checkout.make(tmp_path / "checkout")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built once, alone in its folder.

    RBLN is chosen because torch_rbln is installed, although there is an nvcc.
    """
    folder = tmp_path_factory.mktemp("wheel")
    path = with_nvcc(folder / "cuda")
    return Checkout.make(folder / "checkout").wheel(folder / "dist", PATH=path)


@pytest.fixture(scope="session")
def pinned_sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LMCache's sdist, in the cache that the tests share with this checkout."""
    kept = CACHE / "sdist" / "lmcache-0.5.6.tar.gz"
    if not kept.exists():
        done = Checkout.make(tmp_path_factory.mktemp("pin") / "checkout").metadata()
        assert done.status == 0, done.output
    return kept


@pytest.fixture(scope="module")
def build_environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Every package but ours and torch-rbln: a machine that only builds."""
    folder = tmp_path_factory.mktemp("environment") / "build"
    return Environment.make(folder, without={"lmcache", "rbln-sim", "torch-rbln"})


@pytest.fixture(scope="module")
def serving_environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """torch, vLLM and vllm-rbln with what they need, and nothing of LMCache."""
    folder = tmp_path_factory.mktemp("environment") / "serving"
    without = {"lmcache", "lmcache-rbln", "rbln-sim"}
    without |= required("lmcache.txt") | required("tools.txt")
    return Environment.make(folder, without=without - {"pip"})
