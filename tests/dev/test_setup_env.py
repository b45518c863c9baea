# SPDX-License-Identifier: Apache-2.0
"""The set-up of the development environment."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module under test, with a .venv and steps of its own."""
    path = ROOT / "dev" / "setup_env.py"
    spec = importlib.util.spec_from_file_location("setup_env", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "setup_env", module)  # dataclasses look there
    spec.loader.exec_module(module)
    venv = tmp_path / ".venv"
    for name, value in {
        "VENV": venv,
        "PYTHON": venv / "bin" / "python",
        "STATE": venv / "setup-state.json",
        "LOG": venv / "setup.log",
        "MAKING": tmp_path / "making",
        "HEARTBEAT_S": 0.05,
    }.items():
        monkeypatch.setattr(module, name, value)
    yield module


class Steps:
    """Two steps that note when they run."""

    def __init__(self, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inputs = {"first": "1", "second": "2"}
        self.ran: list[str] = []
        self.product = module.VENV / "product"
        steps = {
            name: module.Step(
                name,
                lambda name=name: self.inputs[name],
                lambda name=name: self.ran.append(name),
                self.product if name == "second" else module.VENV,
            )
            for name in self.inputs
        }
        monkeypatch.setattr(module, "STEPS", steps)
        monkeypatch.setattr(module, "make_venv", self.make_venv)
        self.python = module.PYTHON

    def make_venv(self) -> None:
        self.ran.append("venv")
        self.python.parent.mkdir(parents=True)
        self.python.touch()
        self.product.touch()


def test_a_second_run_sets_nothing_up_again(
    setup_env: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps = Steps(setup_env, monkeypatch)
    setup_env.set_up()
    assert steps.ran == ["venv", "first", "second"]
    assert re.search(r"\[1/2\] first\n.*\n\[2/2\] second", capsys.readouterr().out)

    setup_env.set_up()
    assert steps.ran == ["venv", "first", "second"]
    assert capsys.readouterr().out == ".venv is up to date\n"


def test_a_venv_of_somebody_else_is_not_replaced(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(setup_env, monkeypatch)
    setup_env.VENV.touch()
    with pytest.raises(setup_env.SetupError, match="move it away or remove it"):
        setup_env.set_up()
    setup_env.VENV.unlink()
    setup_env.VENV.mkdir()
    other = setup_env.VENV / "pyvenv.cfg"
    other.touch()
    with pytest.raises(setup_env.SetupError, match="move it away or remove it"):
        setup_env.set_up()
    assert steps.ran == []
    assert not setup_env.MAKING.exists()
    other.unlink()
    setup_env.set_up()
    assert steps.ran == ["venv", "first", "second"]
    # Nor is one that takes the place of the set-up's own.
    setup_env.STATE.unlink()
    with pytest.raises(setup_env.SetupError, match="move it away or remove it"):
        setup_env.set_up()


def test_what_an_interrupted_set_up_has_left_is_made_again(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(setup_env, monkeypatch)

    def interrupted() -> None:
        setup_env.VENV.mkdir()
        (setup_env.VENV / "pyvenv.cfg").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(setup_env, "make_venv", interrupted)
        with pytest.raises(KeyboardInterrupt):
            setup_env.set_up()
    setup_env.set_up()
    assert steps.ran == ["venv", "first", "second"]


def test_only_what_changed_or_is_gone_is_done_again(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(setup_env, monkeypatch)
    setup_env.set_up()
    steps.ran.clear()

    steps.inputs["first"] = "changed"
    setup_env.set_up()
    assert steps.ran == ["first"]

    steps.product.unlink()
    setup_env.set_up()
    assert steps.ran == ["first", "second"]


def test_a_failed_step_is_done_again_and_the_ones_before_it_are_kept(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(setup_env, monkeypatch)

    def broken() -> None:
        raise setup_env.SetupError("no")

    whole = setup_env.STEPS["second"]
    setup_env.STEPS["second"] = setup_env.Step("second", whole.inputs, broken)
    with pytest.raises(setup_env.SetupError):
        setup_env.set_up()
    setup_env.STEPS["second"] = whole
    setup_env.set_up()
    assert steps.ran == ["venv", "first", "second"]


def test_a_long_command_shows_progress_and_a_failed_one_its_output(
    setup_env: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_env.VENV.mkdir()
    # It takes until its progress was shown.
    shown = setup_env.VENV / "shown"
    last_sign_of_life = setup_env.last_sign_of_life

    def doing(lines: list[str]) -> str:
        sign = last_sign_of_life(lines)
        if "something big" in sign:
            shown.touch()
        return sign

    monkeypatch.setattr(setup_env, "last_sign_of_life", doing)
    code = (
        "import os, sys, time; print('Downloading something big', flush=True)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "sys.exit('the reason')"
    )
    with pytest.raises(setup_env.SetupError, match="the reason") as failure:
        setup_env.execute([sys.executable, "-c", code, str(shown)])
    assert "Downloading something big" in capsys.readouterr().out
    assert str(setup_env.LOG) in str(failure.value)


def test_compiling_is_told_by_the_name_of_the_source(setup_env: ModuleType) -> None:
    ninja = "[3/6] c++ -MMD -I/a -c /b/csrc/fold.cpp -o /c/fold.o"
    said = setup_env.last_sign_of_life(["Building wheel", ninja, "a warning"])
    assert said == "compiling fold.cpp (3/6)"


@pytest.mark.parametrize(
    ("index", "asked"), [("", "the package indexes of pip"), ("URL", "the index URL")]
)
def test_a_torch_that_cannot_be_found_names_the_setting(
    index: str,
    asked: str,
    setup_env: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[tuple[str, ...]] = []

    def pip(*arguments: str) -> None:
        commands.append(arguments)
        raise setup_env.SetupError("ERROR: No matching distribution found for torch")

    monkeypatch.setattr(setup_env, "pip", pip)
    monkeypatch.setenv("TORCH_INDEX_URL", index)
    wanted = rf"wanted torch==2\.13\.0\+cpu, got none from {asked}\. Fix: set TORCH_IND"
    with pytest.raises(setup_env.SetupError, match=wanted):
        setup_env.install_torch()
    assert ("--index-url" in commands[0]) is bool(index)


def test_the_name_vllm_answers_and_can_be_uninstalled(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = setup_env.VENV / "lib" / "python3.11" / "site-packages"
    (site / "vllm-0.1.0.dist-info").mkdir(parents=True)
    setup_env.name_vllm()

    (found,) = importlib.metadata.distributions(path=[str(site)])
    assert (found.name, found.version) == ("vllm", "0.30.0+cpu")
    assert {file.name for file in found.files or ()} == {
        "METADATA",
        "INSTALLER",
        "RECORD",
    }


@pytest.mark.parametrize(("in_front", "count"), [(False, 6), (True, 1)])
def test_every_requirement_is_pinned_once(in_front: bool, count: int) -> None:
    files = [
        path
        for path in sorted((ROOT / "dev" / "requirements").glob("*.txt"))
        if (path.name == "stack-next.txt") is in_front
    ]
    lines = [
        line
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    ]
    names = [line.split("==")[0].lower().replace("_", "-") for line in lines]

    assert len(files) == count
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+", line) for line in lines)
    assert len(names) == len(set(names))
    assert "triton" not in names
    assert not [n for n in names if n.startswith(("nvidia", "cuda", "cupy"))]
