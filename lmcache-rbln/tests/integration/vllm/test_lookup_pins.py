# SPDX-License-Identifier: Apache-2.0
"""What a request's lookups pin in LMCache's engine is released, whatever becomes of it.

Chunks that stay pinned are never evicted; those released too soon may be gone when they
are to be loaded.
"""

# Standard
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

# Third Party
from one_worker import CHUNK, PagedKV, engine_of
from scheduler_side import Lookup, scheduler_side
import pytest
from vllm.v1.core.sched.output import SchedulerOutput

# First Party
from lmcache_rbln.integration.vllm.recovery import UnloadedBlocks

pytestmark = pytest.mark.npu

PROMPT = list(range(2 * CHUNK))


class Pins:
    """An engine that has two chunks of a prompt."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        engine.store(PROMPT, req_id="stored")

    def look_up(self, request: str) -> int:
        """Look the prompt up as LMCache's lookup server does."""
        found: int = self.engine.lookup(tokens=PROMPT, lookup_id=request, pin=True)
        return found

    def held(self) -> list[int]:
        """The pins of each chunk."""
        cpu = self.engine.storage_manager.storage_backends["LocalCPUBackend"]
        return [obj.metadata.pin_count for obj in cpu.hot_cache.values()]


@pytest.fixture
def pins() -> Iterator[Pins]:
    with engine_of(PagedKV()) as engine:
        yield Pins(engine)


def test_a_lookup_asked_again_holds_once(pins: Pins) -> None:
    """LMCache 0.5.6 forgot the first one's pins."""
    for _ in range(3):
        assert pins.look_up("r") == len(PROMPT)
        assert pins.held() == [1, 1]
    pins.engine.lookup_unpin("r")
    assert pins.held() == [0, 0]


def test_requests_of_one_prompt_release_each_its_own(pins: Pins) -> None:
    for request in ("a", "b", "a"):
        pins.look_up(request)
    assert pins.held() == [2, 2]
    pins.engine.lookup_unpin("a")
    pins.engine.lookup_unpin("a")
    assert pins.held() == [1, 1]
    pins.engine.lookup_unpin("b")
    assert pins.held() == [0, 0]


def test_a_lookup_that_finds_less_when_asked_again_holds_less(pins: Pins) -> None:
    pins.look_up("r")
    assert pins.engine.clear(PROMPT[:CHUNK]) == 1
    assert pins.look_up("r") == 0
    assert pins.held() == [0]


@pytest.mark.parametrize("scheduled", [False, True])
def test_an_ended_request_holds_nothing(pins: Pins, scheduled: bool) -> None:
    """Aborted before its first step, or looked up late, behind its last one."""
    connector = scheduler_side(Lookup(CHUNK), CHUNK, CHUNK)
    if not scheduled:
        connector._adapter.load_specs["r"] = object()
    pins.look_up("r")
    step = SchedulerOutput.make_empty()
    step.finished_req_ids = {"r"}
    metadata = connector.build_connector_meta(step)
    assert metadata.ended_requests == ["r"]
    next_metadata = connector.build_connector_meta(SchedulerOutput.make_empty())
    begin_step(connector, pins, metadata)
    assert pins.held() == [0, 0]
    # The scheduler waited no longer for this one.
    pins.look_up("r")
    pins.look_up("other")
    begin_step(connector, pins, next_metadata)
    assert pins.held() == [1, 1]


def begin_step(connector: Any, pins: Pins, metadata: Any) -> None:
    """Begin a step on a worker that has this engine."""
    connector._adapter._manager = SimpleNamespace(lmcache_engine=pins.engine)
    connector._adapter.kv_caches = {"layer": None}
    connector._adapter._parent = connector
    connector._adapter._invalid_block_ids = set()
    connector._unloaded, connector._unreported = UnloadedBlocks(CHUNK), set()
    connector._ended = getattr(connector, "_ended", deque(maxlen=2))
    connector.bind_connector_metadata(metadata)
    connector.start_load_kv(SimpleNamespace(attn_metadata=None))
