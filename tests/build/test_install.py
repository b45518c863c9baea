# SPDX-License-Identifier: Apache-2.0
"""Installing the wheel where vLLM-RBLN already runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.build.conftest import required
from tests.build.workshop import Environment

WANTED = "lmcache==0.5.6+rbln"
# torch_rbln's import fails where there is no NPU runtime, as here.
NO_RUNTIME = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


@pytest.fixture(scope="module")
def installed(
    serving_environment: Environment, wheel: Path
) -> tuple[Environment, dict[str, str], set[str]]:
    """The environment after the documented command, and what it was before."""
    before = serving_environment.freeze()
    complaints = serving_environment.complaints()
    arguments = ("install", WANTED, "--find-links", wheel.parent)
    done = serving_environment.pip(*arguments, cwd=Path("/"))
    assert done.status == 0, done.output
    return serving_environment, before, complaints


def test_the_environment_is_the_one_in_question(
    installed: tuple[Environment, dict[str, str], set[str]],
) -> None:
    _, before, _ = installed
    assert before["torch"] == "2.13.0+cpu"
    assert before["vllm"] == "0.30.0+cpu"
    assert before["vllm-rbln"] == before["torch-rbln"] == "0.12.0"
    assert "lmcache" not in before


def test_no_distribution_that_was_there_changes(
    installed: tuple[Environment, dict[str, str], set[str]],
) -> None:
    environment, before, _ = installed
    after = environment.freeze()

    assert {name: after.get(name) for name in before} == before
    assert after["lmcache"] == "0.5.6+rbln"


def test_adds_what_the_set_up_pins_and_nothing_of_cuda(
    installed: tuple[Environment, dict[str, str], set[str]],
) -> None:
    environment, before, _ = installed

    assert environment.freeze().keys() - before == {"lmcache"} | required("lmcache.txt")


def test_pip_check_says_nothing_new(
    installed: tuple[Environment, dict[str, str], set[str]],
) -> None:
    environment, _, complaints = installed
    assert environment.complaints() - complaints == set()


def test_it_imports(installed: tuple[Environment, dict[str, str], set[str]]) -> None:
    code = "import lmcache, lmcache.lmcache_native; print(lmcache.__version__)"
    done = installed[0].run("-c", code, cwd=Path("/"), **NO_RUNTIME)

    assert done.status == 0, done.output
    assert done.output.splitlines()[-1] == "0.5.6+rbln"


@pytest.mark.parametrize(
    "command", [("-c", "import lmcache"), ("-m", "lmcache.cli.main", "--help")]
)
def test_another_torch_is_refused_naming_both(
    command: tuple[str, ...],
    installed: tuple[Environment, dict[str, str], set[str]],
) -> None:
    environment = installed[0]
    with environment.another_torch("2.14.1+cpu"):
        done = environment.run(*command, cwd=Path("/"), **NO_RUNTIME)

    assert done.status != 0
    message = "this LMCache was built for torch 2.13.0+cpu, got torch 2.14.1+cpu"
    assert message in done.output
    assert "CLI-only mode" not in done.output
