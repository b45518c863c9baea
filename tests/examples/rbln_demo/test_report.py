# SPDX-License-Identifier: Apache-2.0
"""The demo's verdict: every deviation is named, and none is invented."""

# Standard
from dataclasses import replace
import re

# Third Party
import pytest

# First Party
from examples.rbln_demo.report import Measurement, find_problems, format_table
from tests.support.serving.client import Completion


def completion(*tokens: int, ttft_s: float, cached: int = 0) -> Completion:
    return Completion(tokens, ttft_s, ttft_s + 1.0, cached)


GOOD = Measurement(
    runtime="SIMULATED NPU (test)",
    transport="SHM",
    wanted_transport="SHM",
    chunk_size=256,
    prompt_tokens=(600, 256),
    cold=(completion(1, 2, ttft_s=2.0), completion(3, 4, ttft_s=4.0)),
    warm=(
        completion(1, 2, ttft_s=0.2, cached=512),
        completion(3, 4, ttft_s=0.4, cached=256),
    ),
    stored_chunks=3,
    stored_bytes=3 * 1024,
    restored_tokens=768,
    restored_chunks=3,
    cold_hits=0,
    local_hits=0,
)


def test_good_run_has_no_problem_and_its_table_says_so() -> None:
    assert find_problems(GOOD) == []
    table = format_table(GOOD)
    assert "tokens restored     768 of 768" in table
    assert "TTFT warm, median   300 ms (10.0 x)" in table
    assert "outputs equal       2 of 2" in table


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"stored_chunks": 2}, "chunks stored by the cold round: wanted 3, got 2"),
        ({"restored_tokens": 767}, "tokens restored in the warm round: wanted 768"),
        ({"restored_chunks": 4}, "chunks read back in the warm round: wanted 3"),
        ({"cold_hits": 256}, "tokens restored in the cold round: wanted 0, got 256"),
        ({"local_hits": 1}, "vLLM's own prefix cache: wanted 0, got 1"),
        ({"transport": None}, "transport: wanted SHM, got None"),
        (
            {"warm": (GOOD.warm[0], completion(3, 5, ttft_s=0.4))},
            r"prompt 2: warm output differs from cold at token 1 \(4 became 5\)",
        ),
    ],
)
def test_each_deviation_is_named(change: dict[str, object], problem: str) -> None:
    [found] = find_problems(replace(GOOD, **change))  # type: ignore[arg-type]
    assert re.search(problem, found)
