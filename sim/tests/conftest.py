# SPDX-License-Identifier: Apache-2.0
"""The simulator's tests use its own pytest plugin."""

# Standard
from collections.abc import Callable, Iterator
import subprocess

# Third Party
import pytest

# First Party
from sim.tests.zygote import Run, zygote


def pytest_configure(config: pytest.Config) -> None:
    # Not `pytest_plugins`, which only a conftest at the root may have.
    config.pluginmanager.import_plugin("rbln_sim.pytest_plugin")


@pytest.fixture(scope="session")
def _fork(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    # First Party
    from rbln_sim.pytest_plugin import machine_environment

    folder = tmp_path_factory.mktemp("zygote")
    with zygote(machine_environment(folder), folder) as run:
        yield run


@pytest.fixture
def rbln_sim_fork(
    _fork: Run, rbln_sim_environment: dict[str, str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``rbln_sim_run`` for code that may find torch imported: it starts at once."""
    return lambda code, **variables: _fork(code, rbln_sim_environment | variables)
