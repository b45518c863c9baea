# SPDX-License-Identifier: Apache-2.0
"""Engines with LMCache in process: one at a time, each test module with its own.

Nothing here may import torch at the top, see the conftest above.
"""

# Standard
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
import random

# Third Party
import pytest

# First Party
from tests.support.serving.runtime import Runtime

if TYPE_CHECKING:
    # First Party
    from tests.e2e.inprocess.engines import EnginePool


@pytest.fixture(scope="session")
def engines(
    runtime: Runtime, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EnginePool]:
    """The pool of running engines."""
    # First Party
    from tests.e2e.inprocess.engines import EnginePool

    pool = EnginePool(runtime, tmp_path_factory.mktemp("inprocess"))
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def prompt_of_both() -> list[int]:
    """A prompt for an engine with LMCache in process and for one with a server."""
    chance = random.Random("both")
    return [chance.randrange(3, 512) for _ in range(2 * 256 + 20)]


@pytest.fixture(scope="session")
def chunks_in_process(
    engines: EnginePool, prompt_of_both: list[int]
) -> dict[str, list[bytes]]:
    """Bytes of that prompt's chunks as stored in process, and of another's."""
    engine = engines.get("small")

    def stored(prompt: list[int]) -> list[bytes]:
        before = set(engine.probe_folder.glob("*.chunk"))
        count = len(prompt) // engine.config.chunk_size
        engine.ask(prompt)
        engine.wait(
            lambda: len(set(engine.probe_folder.glob("*.chunk")) - before) == count,
            "the probe writes the chunks down",
        )
        new = set(engine.probe_folder.glob("*.chunk")) - before
        return [path.read_bytes() for path in sorted(new)]

    return {
        "chunks": stored(prompt_of_both),
        "other": stored(engine.prompt(260, "another")),
    }
