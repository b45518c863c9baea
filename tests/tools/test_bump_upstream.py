# SPDX-License-Identifier: Apache-2.0
"""Moving the pin of LMCache, on releases of a few lines."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bump() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "bump_upstream", ROOT / "tools" / "bump_upstream.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def release(root: Path, **modules: str) -> Path:
    """Write the modules of a release; ``__`` stands for a folder."""
    for name, text in modules.items():
        path = root / "lmcache" / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        ("lmcache==1.2.3+rbln", "lmcache==1.3.0rc1+rbln"),
        ('version = "1.2.3"', 'version = "1.3.0rc1"'),
        ("lmcache-1.2.3.tar.gz", "lmcache-1.3.0rc1.tar.gz"),
        ("LMCache 1.2.3.", "LMCache 1.3.0rc1."),
        ("11.2.3, 1.2.30, 1.2.3.4, v1.2.3rc1", "11.2.3, 1.2.30, 1.2.3.4, v1.2.3rc1"),
    ],
)
def test_the_pin_moves_wherever_it_stands(
    text: str, moved: str, bump: ModuleType, tmp_path: Path
) -> None:
    path, history = tmp_path / "a.md", tmp_path / "CHANGELOG.md"
    for file in (path, history):
        file.write_text(text, encoding="utf-8")
    words = {"1.2.3": "1.3.0rc1"}
    assert bump.move_pin([path, history], words) == (text != moved)
    assert path.read_text(encoding="utf-8") == moved
    assert history.read_text(encoding="utf-8") == text
    # And back.
    bump.move_pin([path], {new: old for old, new in words.items()})
    assert path.read_text(encoding="utf-8") == text


def test_two_pins_change_places(
    bump: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice is as before; whoever builds a release gets the same patches for it."""
    for name in ("patches", "lmcache-rbln/pyproject.toml", "upstream.toml"):
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
    monkeypatch.setattr(bump, "ROOT", tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    monkeypatch.setattr(bump, "tracked", lambda _: files)

    def state() -> list[object]:
        pins = [
            bump.overlay.Upstream.load(tmp_path / "upstream.toml", each)
            for each in bump.RELEASES
        ]
        # Where files of the in-process engine stand is not asked here.
        patches = [
            bump.overlay.patches(tmp_path, tmp_path / "no stage", each)
            for each in bump.RELEASES
        ]
        return [
            (pin.version, pin.sha256, p) for pin, p in zip(pins, patches, strict=True)
        ]

    before = state()
    asked = (tmp_path / "lmcache-rbln/pyproject.toml").read_text(encoding="utf-8")
    assert bump.main(["--swap"]) == 0
    assert state() == before[::-1]
    assert bump.main(["--swap"]) == 0
    assert state() == before
    # Its range of releases is still one.
    assert (tmp_path / "lmcache-rbln/pyproject.toml").read_text("utf-8") == asked


@pytest.mark.parametrize("words", [[], ["1.2.3", "--swap"], ["OTHER"]], ids=str)
def test_what_it_cannot_do_is_refused(bump: ModuleType, words: list[str]) -> None:
    pins = bump.overlay.Upstream.load(ROOT / "upstream.toml", bump.overlay.NEXT)
    with pytest.raises(SystemExit):
        bump.main([pins.version if word == "OTHER" else word for word in words])


def test_interfaces_that_moved_or_changed_are_named(
    bump: ModuleType, tmp_path: Path
) -> None:
    old = release(
        tmp_path / "old",
        a="class Kept:\n    size: int\n    def run(self, x): ...\n",
        b="class Moved: ...\ndef gone(): ...\n",
    )
    new = release(
        tmp_path / "new",
        a="class Kept:\n    size: str\n    def run(self, x, y=1): ...\n",
        c__d="class Moved: ...\n",
    )
    ours = tmp_path / "ours.py"
    ours.write_text(
        "from lmcache.a import Kept\nfrom lmcache.b import Moved, gone\n"
        "from lmcache.unknown import native\nfrom elsewhere import x\n",
        encoding="utf-8",
    )
    found = list(bump.interface_findings(bump.uses([ours]), old, new))
    assert found == [
        "lmcache.a.Kept: run(self, x) -> run(self, x, y=1)",
        "lmcache.a.Kept: size: int -> size: str",
        "lmcache.b.Moved is gone; now: lmcache.c.d",
        "lmcache.b.gone is gone; now: none",
    ]
    assert not list(bump.interface_findings(bump.uses([ours]), new, new))


def test_quoted_messages_and_metrics_that_are_gone_are_named(
    bump: ModuleType, tmp_path: Path
) -> None:
    old = release(
        tmp_path / "old",
        a="log('Retrieved %d out of %d required tokens')\nm = 'lmcache:hits_total'\n",
    )
    new = release(tmp_path / "new", a="log('Got %d of %d tokens')\n")
    page = tmp_path / "page.md"
    page.write_text(
        "`Retrieved 5 out of 7 required tokens`, lmcache:hits_total, `our own words`",
        encoding="utf-8",
    )
    found = list(bump.message_findings(bump.literals([page]), old, new))
    assert [line.split(" (in ")[0] for line in found] == [
        "'required tokens'",
        "'lmcache:hits_total'",
    ]


def test_a_patch_and_an_owned_file_that_no_longer_fit_are_named(
    bump: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = tmp_path / "ours"
    (ours / "patches").mkdir(parents=True)
    (ours / "patches" / "one.patch").write_text(
        "Why.\n--- a/lmcache/a.py\n+++ b/lmcache/a.py\n@@ -1 +1 @@\n-old\n+new\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(bump, "ROOT", ours)
    old = release(tmp_path / "old", a="old\n", device__x="1")
    new = release(tmp_path / "new", a="other\n", device__x="2")
    pin = bump.overlay.Upstream(
        release="",
        name="lmcache",
        version="1.2.3",
        sha256="",
        local_version="rbln",
        owned=("lmcache/device",),
        replaced={},
        dropped=frozenset(),
        relaxed={},
    )
    (ours / "lmcache" / "device").mkdir(parents=True)
    (ours / "lmcache" / "device" / "x.py").touch()
    first, second = bump.overlay_findings(pin, old, new)
    assert first.startswith("patches/one.patch no longer fits: ")
    assert second == "lmcache/device/x.py: theirs changed; we have our own in its place"
