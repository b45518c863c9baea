# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the RBLN backend's tests."""

# Third Party
import pytest


@pytest.fixture(
    scope="module", params=["cpu", pytest.param("rbln:0", marks=pytest.mark.npu)]
)
def device(request: pytest.FixtureRequest) -> str:
    """The device of the KV cache: the ops accept CPU tensors as well."""
    return request.param
