# SPDX-License-Identifier: Apache-2.0
"""The patches fit both releases of LMCache to the letter."""

# Standard
from pathlib import Path
import ast
import sys
import tarfile

# Third Party
import pytest

# First Party
from tests.build.workshop import ROOT

sys.path.insert(0, str(ROOT / "setup_extensions"))
import lmcache_overlay as overlay  # noqa: E402

sys.path.pop(0)


@pytest.mark.parametrize("release", ["", overlay.NEXT])
def test_they_fit(release: str, tmp_path: Path) -> None:
    pin = overlay.Upstream.load(ROOT / "upstream.toml", release)
    name = f"{pin.name}-{pin.version}"
    sdist = ROOT / "build" / "cache" / "sdist" / f"{name}.tar.gz"
    if not sdist.is_file():
        pytest.skip(f"no {sdist.name} here: `make setup-next` downloads it")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    stage = tmp_path / name
    overlay.apply_patches(ROOT, stage, release)
    patched = overlay.patches(ROOT, stage, release)
    for path in {path for files in patched.values() for path in files}:
        if path.endswith(".py"):
            ast.parse((stage / path).read_text(encoding="utf-8"))


def test_a_patch_for_one_release_names_a_patch_or_gives_all_of_one() -> None:
    """A slip in a file's name would leave the other release's hunks in place."""
    for own in (ROOT / overlay.PATCHES / overlay.NEXT).glob("*.patch"):
        shared = overlay.patch_sections(ROOT / overlay.PATCHES / own.name)
        assert shared, f"no {own.name} in {overlay.PATCHES}"
        assert shared.keys() & overlay.patch_sections(own).keys()
