# SPDX-License-Identifier: Apache-2.0
"""Moving the pin of LMCache, on releases of a few lines."""

from __future__ import annotations

import importlib.util
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
    old, new = {"version": "1.2.3"}, {"version": "1.3.0rc1"}
    assert bump.move_pin([path, history], old, new) == (text != moved)
    assert path.read_text(encoding="utf-8") == moved
    assert history.read_text(encoding="utf-8") == text
    # And back.
    bump.move_pin([path], new, old)
    assert path.read_text(encoding="utf-8") == text


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
