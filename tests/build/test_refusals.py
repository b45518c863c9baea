# SPDX-License-Identifier: Apache-2.0
"""Builds that stop, each with a message that names what was wanted and the fix."""

from __future__ import annotations

import os
import sys
import tarfile
from pathlib import Path

import pytest

from tests.build.workshop import (
    ROOT,
    Checkout,
    clean_environ,
    decoy_compiler,
    run,
)

PROFILE = "setup_extensions/build_profiles/rbln.py"
PINNED = "d6951e60ce8818a76aa42d0866a4ba85f1c95cd919355fff30ff24dcc3243f1e"


def hide(folder: Path, *modules: str) -> dict[str, str]:
    """Return settings with which Python does not find some modules."""
    lines = [f"sys.modules[{name!r}] = None\n" for name in modules]
    folder.mkdir()
    code = "import sys\n" + "".join(lines)
    (folder / "sitecustomize.py").write_text(code, encoding="utf-8")
    return {"PYTHONPATH": str(folder)}


def staged(checkout: Checkout) -> bool:
    """Tell whether a build got as far as making a stage."""
    return (checkout.root / "build" / "wheel").exists()


def test_an_isolated_build_names_the_flag(checkout: Checkout, tmp_path: Path) -> None:
    command: list[str | Path] = [sys.executable, "-m", "pip", "wheel", "."]
    command += ["--no-deps", "--wheel-dir", tmp_path]
    done = run(command, checkout.root, clean_environ(BUILD_WITH_RBLN="1"))

    assert done.status != 0
    assert "wanted the torch that LMCache will run with" in done.output
    assert "pass --no-build-isolation" in done.output
    assert not staged(checkout)


def test_without_torch_rbln_or_the_switch_both_are_named(
    checkout: Checkout, tmp_path: Path
) -> None:
    done = checkout.metadata(**hide(tmp_path / "hidden", "torch_rbln"))

    assert done.status != 0
    assert "wanted the package torch_rbln, or BUILD_WITH_RBLN=1" in done.output
    assert not staged(checkout)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("BUILD_WITH_HIP", "1", "got BUILD_WITH_HIP=1"),
        ("BUILD_WITH_MOONCAKE", "true", "got BUILD_WITH_MOONCAKE=true"),
        ("BUILD_WITH_RBLN", "yes", "wanted BUILD_WITH_RBLN to be 0 or 1; got 'yes'"),
        ("NO_NATIVE_EXT", "1", "got NO_NATIVE_EXT=1"),
        ("NO_CUDA_EXT", "1", "got NO_CUDA_EXT=1"),
        ("NO_GPU_EXT", "1", "got NO_GPU_EXT=1"),
    ],
)
def test_another_profile_is_an_error(
    name: str, value: str, message: str, checkout: Checkout
) -> None:
    done = checkout.metadata(**{name: value})

    assert done.status != 0
    assert message in done.output
    assert not staged(checkout)


def test_a_tampered_sdist_is_refused_naming_both_hashes(
    checkout: Checkout, pinned_sdist: Path, tmp_path: Path
) -> None:
    tampered = tmp_path / pinned_sdist.name
    tampered.write_bytes(pinned_sdist.read_bytes() + b"\0")
    done = checkout.metadata(LMCACHE_SDIST=str(tampered))

    assert done.status != 0
    assert f"with sha256 {PINNED}; got " in done.output
    assert str(tampered) in done.output
    assert not staged(checkout)


def test_a_tampered_download_is_refused(
    checkout: Checkout, pinned_sdist: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "cache" / "sdist" / pinned_sdist.name
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"not an sdist")
    done = checkout.metadata(LMCACHE_BUILD_CACHE=str(tmp_path / "cache"))

    assert done.status != 0
    assert f"with sha256 {PINNED}; got " in done.output
    assert str(kept) in done.output


def test_pip_refuses_a_download_with_another_hash(
    checkout: Checkout, tmp_path: Path
) -> None:
    pin = checkout.root / "upstream.toml"
    other = pin.read_text(encoding="utf-8").replace(PINNED, "0" * 64)
    pin.write_text(other, encoding="utf-8")
    done = checkout.metadata(LMCACHE_BUILD_CACHE=str(tmp_path / "cache"))

    assert done.status != 0
    assert "DO NOT MATCH THE HASHES" in done.output
    assert PINNED in done.output
    assert not staged(checkout)


def test_a_missing_sdist_is_named(checkout: Checkout, tmp_path: Path) -> None:
    done = checkout.metadata(LMCACHE_SDIST=str(tmp_path / "nowhere"))

    assert done.status != 0
    assert f"got LMCACHE_SDIST={tmp_path / 'nowhere'}" in done.output


def test_an_undeclared_collision_is_named(checkout: Checkout) -> None:
    (checkout.root / "lmcache" / "utils.py").write_text("# ours\n", encoding="utf-8")
    done = checkout.metadata()

    assert done.status != 0
    assert "got lmcache/utils.py, which LMCache 0.5.6 has too" in done.output
    assert not staged(checkout)


@pytest.fixture(scope="module")
def unpacked(pinned_sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LMCache as its developers would have it on disk."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(pinned_sdist) as archive:
        archive.extractall(folder, filter="data")
    return folder / "lmcache-0.5.6"


def test_a_checkout_of_lmcache_is_taken_and_left_alone(
    checkout: Checkout, unpacked: Path
) -> None:
    before = sorted(unpacked.rglob("*"))
    done = checkout.metadata(LMCACHE_SDIST=str(unpacked))

    assert done.status == 0, done.output
    assert sorted(unpacked.rglob("*")) == before
    (file,) = checkout.root.glob("metadata/*/METADATA")
    assert "\nVersion: 0.5.6+rbln\n" in file.read_text(encoding="utf-8")


def test_a_replaced_file_that_changed_upstream_is_named(
    checkout: Checkout, unpacked: Path
) -> None:
    with (unpacked / PROFILE).open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    done = checkout.metadata(LMCACHE_SDIST=str(unpacked))

    assert done.status != 0
    assert f"wanted {PROFILE} of LMCache with sha256" in done.output


def test_another_code_generator_is_refused(checkout: Checkout, tmp_path: Path) -> None:
    info = tmp_path / "other" / "grpcio_tools-1.85.0.dist-info"
    info.mkdir(parents=True)
    text = "Metadata-Version: 2.1\nName: grpcio-tools\nVersion: 1.85.0\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
    done = checkout.metadata(PYTHONPATH=str(info.parent))

    assert done.status != 0
    assert "wanted grpcio-tools 1.78.0" in done.output
    assert "got 1.85.0" in done.output


def test_the_decoy_is_a_compiler_only_by_name(tmp_path: Path) -> None:
    decoy = decoy_compiler(tmp_path)
    said = run([decoy, "--version"], tmp_path, dict(os.environ))
    assert said == run(["c++", "--version"], tmp_path, dict(os.environ))
    assert run([decoy, "-c", ROOT / "x.cpp"], tmp_path, dict(os.environ)).status == 1
