# SPDX-License-Identifier: Apache-2.0
"""Editable installs: live, importable from anywhere, compiled once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.build.workshop import Checkout, Environment, Run, decoy_compiler

DEVICE = "lmcache/v1/platform/devices/rbln"
MODULE = DEVICE.replace("/", ".")


@dataclass(frozen=True)
class Editable:
    """A checkout, and an environment without torch-rbln that imports from it."""

    checkout: Checkout
    environment: Environment

    def install(self, **settings: str) -> Run:
        """Run the documented command."""
        return self.environment.pip(
            "install",
            "-e",
            ".",
            "--no-build-isolation",
            cwd=self.checkout.root,
            BUILD_WITH_RBLN="1",
            **settings,
        )

    def python(self, code: str, cwd: Path) -> str:
        """Run code and return the last line that it prints."""
        done = self.environment.run("-c", code, cwd=cwd)
        assert done.status == 0, done.output
        return done.output.splitlines()[-1]


@pytest.fixture(scope="module")
def editable(
    tmp_path_factory: pytest.TempPathFactory,
    build_environment: Environment,
) -> Editable:
    """An editable install."""
    checkout = Checkout.make(tmp_path_factory.mktemp("editable") / "checkout")
    made = Editable(checkout, build_environment)
    done = made.install()
    assert done.status == 0, done.output
    return made


@pytest.mark.parametrize("where", ["/", "checkout", "lmcache"])
def test_imports_from(where: str, editable: Editable) -> None:
    root = editable.checkout.root
    cwd = {"/": Path("/"), "checkout": root, "lmcache": root / "lmcache"}[where]
    code = f"import lmcache, {MODULE}.kv_layout; print(lmcache.__file__)"

    stage = root / "build" / "editable" / "lmcache"
    assert editable.python(code, cwd) == str(stage / "__init__.py")


def test_a_change_to_our_file_is_live(editable: Editable) -> None:
    path = editable.checkout.root / DEVICE / "kv_layout.py"
    with path.open("a", encoding="utf-8") as file:
        file.write("\nADDED_BY_A_TEST = 'seen'\n")

    code = f"from {MODULE} import kv_layout as m; print(m.ADDED_BY_A_TEST)"
    assert editable.python(code, Path("/")) == "seen"


def test_lmcache_in_the_checkout_holds_only_our_files(
    editable: Editable, checkout: Checkout
) -> None:
    assert editable.checkout.files("lmcache") == checkout.files("lmcache")


def test_a_second_build_compiles_nothing_and_takes_a_new_file(
    editable: Editable, tmp_path: Path
) -> None:
    new = editable.checkout.root / DEVICE / "added_by_a_test.py"
    new.write_text("VALUE = 7\n", encoding="utf-8")
    try:
        done = editable.install(CXX=str(decoy_compiler(tmp_path)))
        assert done.status == 0, done.output
        code = f"import {MODULE}.added_by_a_test as m; print(m.VALUE)"
        assert editable.python(code, Path("/")) == "7"
    finally:
        new.unlink()
