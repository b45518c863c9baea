# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism over the custom kernel's KV layout."""

# Standard
from collections.abc import Iterator

# Third Party
import pytest

# First Party
from tests.e2e.inprocess.engines import EnginePool, InProcessEngine

CHUNK = 256


@pytest.fixture(scope="module")
def engine(engines: EnginePool) -> Iterator[InProcessEngine]:
    yield engines.get("two-npus")
    engines.stop()  # three processes that would take the cores of the next stack


def test_layout_and_devices(engine: InProcessEngine) -> None:
    log = engine.log()
    for rank in range(2):
        assert f"Worker_TP{rank}" in log
    assert log.count("NL_X_TWO_NB_NH_ONE_BS_HS") >= 2
    assert log.count("KV cache on rbln:0: 2 layers of 14 blocks of 128 tokens") == 2


@pytest.mark.parametrize("over", [0, 40])
def test_each_rank_stores_and_restores_its_part(
    engine: InProcessEngine, over: int
) -> None:
    prompt = engine.prompt(2 * CHUNK + over, ("ranks", over))
    [cold] = engine.ask(prompt)
    before, retrieved = engine.hits(), engine.log().count("Retrieved 512 out of 512")
    [warm] = engine.ask(prompt)
    assert warm.token_ids == cold.token_ids
    assert engine.hits() - before == min(2 * CHUNK, len(prompt) - 1)
    assert engine.log().count("Retrieved 512 out of 512") - retrieved == 2
