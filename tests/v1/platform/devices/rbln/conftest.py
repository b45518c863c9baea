# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the RBLN backend's tests."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterator
import sys

# Third Party
import pytest


@pytest.fixture(
    scope="module", params=["cpu", pytest.param("rbln:0", marks=pytest.mark.npu)]
)
def device(request: pytest.FixtureRequest) -> str:
    """The device of the KV cache: the ops accept CPU tensors as well."""
    return request.param


@pytest.fixture(params=["native", "python"])
def pipeline(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Run transfers natively, and as they run where the extension is missing."""
    # Imports torch, which must wait for the simulator.
    # First Party
    from lmcache.v1.platform.devices.rbln import native

    if request.param == "python":
        monkeypatch.setitem(sys.modules, "lmcache.kv_transpose", None)
    native.kv_transpose.cache_clear()
    yield
    native.kv_transpose.cache_clear()
