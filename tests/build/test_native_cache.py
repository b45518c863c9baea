# SPDX-License-Identifier: Apache-2.0
"""When native extensions are compiled again, and when not."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from setuptools.extension import Extension

from tests.build.workshop import ROOT, Checkout, Environment, decoy_compiler, with_nvcc


@pytest.fixture(scope="module")
def native_cache() -> ModuleType:
    """The module under test; its package is only complete in a stage."""
    path = ROOT / "setup_extensions" / "native_cache.py"
    spec = importlib.util.spec_from_file_location("native_cache", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source_tree(root: Path) -> Extension:
    """Make a source tree with one extension."""
    files = {
        "csrc/one.cpp": "int one;",
        "csrc/include/one.h": "extern int one;",
        "csrc/include/notes.md": "words",
        "lmcache/module.py": "x = 1",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return Extension(
        "lmcache.one",
        sources=["csrc/one.cpp"],
        include_dirs=[str(root / "csrc" / "include")],
        extra_compile_args=["-O3"],
    )


def test_the_key_is_the_same_in_another_folder(
    native_cache: ModuleType, tmp_path: Path
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    key_a = native_cache.cache_key(source_tree(a), a)
    assert key_a == native_cache.cache_key(source_tree(b), b)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("csrc/one.cpp", True),
        ("csrc/include/one.h", True),
        ("csrc/include/two.h", True),
        ("csrc/include/notes.md", False),
        ("csrc/other.cpp", False),
        ("lmcache/module.py", False),
        ("setup.py", False),
    ],
)
def test_which_files_the_key_covers(
    name: str, changes: bool, native_cache: ModuleType, tmp_path: Path
) -> None:
    extension = source_tree(tmp_path)
    before = native_cache.cache_key(extension, tmp_path)
    (tmp_path / name).write_text("changed", encoding="utf-8")
    assert (native_cache.cache_key(extension, tmp_path) != before) is changes


def test_the_key_covers_flags_compiler_and_torch(
    native_cache: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extension = source_tree(tmp_path)
    keys = [native_cache.cache_key(extension, tmp_path)]

    def changed() -> str:
        return native_cache.cache_key(extension, tmp_path)

    with monkeypatch.context() as patch:
        patch.setattr(native_cache.torch, "__version__", "2.14.1+cpu")
        keys.append(changed())
    with monkeypatch.context() as patch:
        other = decoy_compiler(tmp_path / "bin", version="another compiler 1.0")
        patch.setenv("CXX", str(other))
        keys.append(changed())
    with monkeypatch.context() as patch:
        patch.setenv("CXXFLAGS", "-march=native")
        keys.append(changed())
    with monkeypatch.context() as patch:
        patch.setenv("UNRELATED", "1")
        assert changed() == keys[0]
    extension.extra_compile_args.append("-g")
    keys.append(changed())
    assert len(set(keys)) == len(keys)


def test_a_changed_header_reaches_the_compiler(
    checkout: Checkout, tmp_path: Path
) -> None:
    # Also shows that the decoy would be noticed where the next test expects none.
    header = checkout.root / "csrc" / "added_by_a_test.h"
    header.parent.mkdir(exist_ok=True)
    header.write_text("// changes what every extension can see\n", encoding="utf-8")
    done = checkout.setup("bdist_wheel", CXX=str(decoy_compiler(tmp_path)))

    assert done.status != 0
    assert "native cache: compiling lmcache.lmcache_native" in done.output
    assert "DECOY COMPILER CALLED" in done.output


def test_rbln_wins_over_nvcc_and_an_installed_copy_compiles_nothing(
    checkout: Checkout,
    build_environment: Environment,
    wheel: Path,
    tmp_path: Path,
) -> None:

    done = build_environment.pip(
        "install",
        ".",
        "--no-build-isolation",
        cwd=checkout.root,
        BUILD_WITH_RBLN="1",
        CXX=str(decoy_compiler(tmp_path)),
        PATH=with_nvcc(tmp_path / "cuda"),
    )

    assert done.status == 0, done.output
    with zipfile.ZipFile(wheel) as archive:
        built = {n for n in archive.namelist() if n.endswith(".so")}
    installed = build_environment.site / "lmcache"
    found = {f"lmcache/{path.name}" for path in installed.glob("*.so")}
    assert found == built
