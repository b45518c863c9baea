# SPDX-License-Identifier: Apache-2.0
"""A KV cache that vLLM-RBLN makes anew after its warm-up, with LMCache in a server."""

# Standard
from importlib.metadata import version
import re

# Third Party
from packaging.version import Version
import pytest

# First Party
from tests.e2e.kv_blocks import assert_same_blocks
from tests.e2e.stack import REGISTERED, Stack

pytestmark = pytest.mark.skipif(
    Version(version("vllm-rbln")) < Version("0.12.1a8"),
    reason="vllm-rbln 0.12.0 sizes it before, if the connector is LMCacheMPConnector",
)


@pytest.mark.parametrize("stack", ["sized"], indirect=True)
def test_the_one_made_after_warm_up_is_registered(stack: Stack) -> None:
    log = stack.engine.process.log()
    made = re.search(r"reallocating KV cache: \d+ -> (\d+)", log)
    assert made
    assert made.start() < log.index(REGISTERED)
    assert f"({made[1]}, 2, " in log[log.index("KV_PROBE") :]

    prompt = stack.prompt(3 * stack.config.chunk_size + 1, "sized")
    [cold] = stack.cold([prompt])
    before = stack.hits()
    [warm] = stack.warm([prompt])

    assert warm.token_ids == cold.token_ids
    assert stack.hits() - before == 3 * stack.config.chunk_size
    assert_same_blocks(stack.stored_blocks(prompt), stack.restored_blocks(prompt))
