# SPDX-License-Identifier: Apache-2.0
"""Our sdist: our files and the pin, which build the same wheel."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.build.workshop import Checkout, clean_environ, run

TOP = "lmcache-0.5.6+rbln"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, made in a checkout in which git tracks everything."""
    folder = tmp_path_factory.mktemp("sdist")
    checkout = Checkout.make(folder / "checkout")
    done = checkout.setup("sdist", "--dist-dir", str(folder / "dist"))
    assert done.status == 0, done.output
    assert not (checkout.root / "build" / "wheel").exists(), "an sdist stages nothing"
    return folder / "dist" / f"{TOP}.tar.gz"


def test_holds_our_files_and_the_pin(sdist: Path, checkout: Checkout) -> None:
    with tarfile.open(sdist) as archive:
        names = {n.removeprefix(f"{TOP}/") for n in archive.getnames() if n != TOP}
    top_files = {name for name in names if "/" not in name}
    folders = ("csrc", "lmcache", "patches", "requirements", "setup_extensions")
    tracked = {name for folder in folders for name in checkout.files(folder)}

    assert top_files >= {"setup.py", "pyproject.toml", "upstream.toml", "LICENSE"}
    assert {n for n in names if n.split("/")[0] in folders} >= tracked
    assert {n.split("/")[0] for n in names if "/" in n} == set(folders)
    assert {n for n in names if n.endswith(".py")} - tracked == {"setup.py"}


def test_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    command: list[str | Path] = [sys.executable, "-m", "pip", "wheel", sdist]
    command += ["--no-build-isolation", "--no-deps", "--wheel-dir", tmp_path]
    done = run(command, tmp_path, clean_environ())

    assert done.status == 0, done.output
    assert contents(tmp_path / wheel.name) == contents(wheel)


def contents(path: Path) -> dict[str, int]:
    """Return name and checksum of each file of a wheel."""
    with zipfile.ZipFile(path) as archive:
        return {info.filename: info.CRC for info in archive.infolist()}
