# SPDX-License-Identifier: Apache-2.0
"""A chunk is the same whichever way it was stored."""

# Third Party
import pytest

# First Party
from tests.e2e.stack_pool import StackPool


def test_kept_in_process(chunks_in_process: dict[str, list[bytes]]) -> None:
    # [K and V, layers, tokens, heads x head size], two bytes each.
    assert [len(chunk) for chunk in chunks_in_process["chunks"]] == [
        2 * 2 * 256 * 2 * 64 * 2
    ] * 2
    assert len({*chunks_in_process["chunks"], *chunks_in_process["other"]}) == 3


@pytest.mark.parametrize("stack", ["blocks-first"])
def test_as_in_a_server(
    stack: str,
    stacks: StackPool,
    prompt_of_both: list[int],
    chunks_in_process: dict[str, list[bytes]],
) -> None:
    server = stacks.get(stack)
    assert server.config.chunk_size == 256
    server.cold([prompt_of_both])
    segment = server.cache.segment
    assert segment is not None
    held = segment.read_bytes()
    for chunk in chunks_in_process["chunks"]:
        assert chunk in held
    for chunk in chunks_in_process["other"]:
        assert chunk not in held
