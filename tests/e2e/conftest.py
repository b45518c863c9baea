# SPDX-License-Identifier: Apache-2.0
"""Servers for the end-to-end tests: started once, one pair at a time.

An NPU has one owner, so a host with a single NPU can hold one engine. Tests are put
in the order of their stacks, and a stack is stopped before the next one starts.

Nothing here may import torch at the top: the conftest at the root has not chosen the
runtime yet when this file is read.
"""

# Standard
from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

# Third Party
import pytest

# First Party
from tests.support.serving.runtime import Runtime, find_runtime

if TYPE_CHECKING:
    # First Party
    from tests.e2e.stack import Stack
    from tests.e2e.stack_pool import StackPool

HERE = Path(__file__).parent
STACK_ORDER = (
    *("", "blocks-first", "kv-first", "mla", "sized"),
    *("hybrid", "hybrid-inline"),
)


@pytest.fixture(scope="session")
def runtime() -> Runtime:
    """NPU or simulator, with the environment that leads to it.

    Copies of the simulator run when something waits for them, their destination
    poisoned until then: whoever reads too early reads garbage. RBLN_SIM_DEFERRED=0 in
    the environment of the tests lets them run as soon as they can.
    """
    found = find_runtime()
    return replace(found, env={"RBLN_SIM_DEFERRED": "latest", **found.env})


@pytest.fixture(scope="session", autouse=True)
def forked_servers(runtime: Runtime) -> Iterator[None]:
    """Start servers as forks of a process that has vLLM imported."""
    # First Party
    from tests.support.forked_programs import forking

    with forking() if runtime.simulated else nullcontext():
        yield


@pytest.fixture(scope="session")
def stacks(
    runtime: Runtime, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StackPool]:
    """The pool of running servers."""
    # First Party
    from tests.e2e.stack_pool import StackPool

    pool = StackPool(runtime, tmp_path_factory.mktemp("e2e"))
    yield pool
    pool.stop()


@pytest.fixture
def stack(request: pytest.FixtureRequest, stacks: StackPool) -> Stack:
    """A running stack; its name is the test's parameter."""
    return stacks.get(request.param)


@pytest.hookimpl(tryfirst=True)  # the root conftest acts on the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests of one stack side by side, those without a stack first."""
    places = [i for i, item in enumerate(items) if HERE in item.path.parents]
    ours = [items[i] for i in places]
    for item in ours:
        item.add_marker(pytest.mark.npu)
        item.add_marker(pytest.mark.slow)
    ours.sort(key=lambda item: STACK_ORDER.index(_stack_name(item)))
    for place, item in zip(places, ours, strict=True):
        items[place] = item


def _stack_name(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("stack", "") if callspec else ""
