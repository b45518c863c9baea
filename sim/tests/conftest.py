# SPDX-License-Identifier: Apache-2.0
"""The simulator's tests use its own pytest plugin."""

# Third Party
import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Not `pytest_plugins`, which only a conftest at the root may have.
    config.pluginmanager.import_plugin("rbln_sim.pytest_plugin")
