# SPDX-License-Identifier: Apache-2.0
"""The declarations in upstream.toml, and what is done with them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.build.workshop import ROOT

PIN = """
[upstream]
name = "lmcache"
version = "1.0"
sha256 = "00"
local_version = "rbln"
[owned]
folders = ["lmcache/device"]
[[replaced]]
path = "lmcache/replaced.py"
sha256 = "{sha256}"
[requirements]
drop = ["Gone_Too"]
relax = {{ numpy = "", "proto.buf" = ">=2" }}
"""


@pytest.fixture
def overlay(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module under test."""
    monkeypatch.syspath_prepend(str(ROOT / "setup_extensions"))
    import lmcache_overlay

    monkeypatch.delitem(sys.modules, "lmcache_overlay")
    return lmcache_overlay


def write(root: Path, **files: str) -> Path:
    """Write files, their names given with __ for a slash and without .py."""
    for name, text in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def load(overlay: ModuleType, folder: Path, more: str = "") -> object:
    """Load declarations that fit ``replaced.py`` with the text "theirs"."""
    path = write(folder / "hashed", theirs="theirs") / "theirs.py"
    file = folder / "upstream.toml"
    text = PIN.format(sha256=overlay.sha256_of(path)) + more
    file.write_text(text, encoding="utf-8")
    return overlay.Upstream.load(file)


def trees(tmp_path: Path) -> tuple[Path, Path]:
    """Return our repository and a stage that are as the declarations say."""
    ours = write(tmp_path / "ours", lmcache__device__a="our a", lmcache__replaced="our")
    stage = write(
        tmp_path / "stage",
        lmcache__device__a="their a",
        lmcache__device__b="their b",
        lmcache__replaced="theirs",
        lmcache__kept="kept",
        tests__kept="their test",
    )
    return ours, stage


@pytest.mark.parametrize("link", [False, True])
def test_owned_folders_hold_only_ours(
    link: bool, overlay: ModuleType, tmp_path: Path
) -> None:
    upstream = load(overlay, tmp_path)
    ours, stage = trees(tmp_path)
    write(ours, tests__mine="not shipped")
    overlay.check_collisions(upstream, ours, stage)
    overlay.lay_over(upstream, ours, stage, link=link)

    found = {p.relative_to(stage).as_posix(): p for p in stage.rglob("*.py")}
    assert {name: path.read_text() for name, path in found.items()} == {
        "lmcache/device/a.py": "our a",
        "lmcache/replaced.py": "our",
        "lmcache/kept.py": "kept",
    }
    assert found["lmcache/device/a.py"].is_symlink() is link


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ({"lmcache__kept": "x"}, {}, "got lmcache/kept.py, which LMCache 1.0 has too"),
        ({"tests__kept": "x"}, {}, "got tests/kept.py, which LMCache 1.0 has too"),
        ({}, {"lmcache__replaced": "new"}, "wanted lmcache/replaced.py of LMCache"),
    ],
)
def test_what_is_not_as_declared_is_named(
    ours: dict[str, str],
    theirs: dict[str, str],
    message: str,
    overlay: ModuleType,
    tmp_path: Path,
) -> None:
    upstream = load(overlay, tmp_path)
    root, stage = trees(tmp_path)
    write(root, **ours)
    write(stage, **theirs)
    with pytest.raises(SystemExit, match=message):
        overlay.check_collisions(upstream, root, stage)


@pytest.mark.parametrize("name", ["lmcache/replaced.py", "lmcache/device/a.py"])
def test_a_declaration_without_a_file_of_ours_is_named(
    name: str, overlay: ModuleType, tmp_path: Path
) -> None:
    upstream = load(overlay, tmp_path)
    root, stage = trees(tmp_path)
    (root / name).unlink()
    with pytest.raises(SystemExit, match=name.removesuffix("/a.py")):
        overlay.check_collisions(upstream, root, stage)


def test_a_path_declared_twice_is_named(overlay: ModuleType, tmp_path: Path) -> None:
    more = '[[replaced]]\npath = "lmcache/device/x.py"\nsha256 = "00"\n'
    with pytest.raises(SystemExit, match=r"lmcache/device/x\.py twice, or inside"):
        load(overlay, tmp_path, more)


PATCH = "{reason}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-{old}\n+new\n"


def write_patch(root: Path, **words: str) -> None:
    """Write a patch of one line."""
    (root / "patches").mkdir()
    words = {"reason": "Why.", "path": "lmcache/kept.py", "old": "kept", **words}
    (root / "patches" / "one.patch").write_text(PATCH.format(**words))


def test_a_patch_changes_a_file_of_lmcache(overlay: ModuleType, tmp_path: Path) -> None:
    ours, stage = trees(tmp_path)
    (stage / "lmcache/kept.py").write_text("kept\n")
    write_patch(ours)
    overlay.apply_patches(ours, stage)
    assert (stage / "lmcache/kept.py").read_text() == "new\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"old": "absent"}, "one.patch to fit"),
        ({"path": "lmcache/nowhere.py"}, "one.patch to fit"),
        ({"path": "lmcache/replaced.py"}, "replaced.py, which is ours"),
        ({"reason": "SPDX-License-Identifier: Apache-2.0"}, "the reason"),
    ],
)
def test_a_patch_that_does_not_fit_is_refused(
    words: dict[str, str], message: str, overlay: ModuleType, tmp_path: Path
) -> None:
    ours, stage = trees(tmp_path)
    (stage / "lmcache/kept.py").write_text("kept\n")
    overlay.lay_over(load(overlay, tmp_path), ours, stage, link=True)
    write_patch(ours, **words)
    with pytest.raises(SystemExit, match=message):
        overlay.apply_patches(ours, stage)
    assert (stage / "lmcache/kept.py").read_text() == "kept\n"


def test_without_the_program_the_fix_is_named(
    overlay: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, stage = trees(tmp_path)
    write_patch(ours)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="apt-get install patch"):
        overlay.apply_patches(ours, stage)


def common(stage: Path, text: str) -> Path:
    """Write LMCache's list of requirements."""
    path = stage / "requirements" / "common.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_requirements_are_dropped_and_relaxed(
    overlay: ModuleType, tmp_path: Path
) -> None:
    upstream = load(overlay, tmp_path)
    text = "# why\nnumpy<=2\ngone-too\nkept >= 1, < 2\nproto_buf<7,>=2\n"
    path = common(tmp_path, text)
    overlay.change_requirements(upstream, tmp_path)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines == ["# why", "numpy", "kept >= 1, < 2", "proto-buf>=2"]


def test_a_requirement_that_lmcache_no_longer_has_is_named(
    overlay: ModuleType, tmp_path: Path
) -> None:
    upstream = load(overlay, tmp_path)
    common(tmp_path, "numpy<=2\nproto.buf<7\n")
    with pytest.raises(SystemExit, match="no gone-too there"):
        overlay.change_requirements(upstream, tmp_path)


def test_caches_and_compiled_files_are_not_ours(
    overlay: ModuleType, tmp_path: Path
) -> None:
    write(tmp_path, lmcache__a="a")
    for name in ("a.pyc", "native.so", "__pycache__/a.txt", ".mypy_cache/a.json"):
        path = tmp_path / "lmcache" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"\0")
    assert overlay.our_files(tmp_path, ("lmcache", "absent")) == ["lmcache/a.py"]


def test_the_declarations_of_this_repository_load(overlay: ModuleType) -> None:
    upstream = overlay.Upstream.load(ROOT / "upstream.toml")
    assert upstream.full_version == "0.5.6+rbln"
    assert "lmcache/v1/platform/devices/rbln" in upstream.owned
