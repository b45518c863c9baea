# SPDX-License-Identifier: Apache-2.0
"""Direct copies against device-staged ones, at the hardware's figures."""

# Future
from __future__ import annotations

# Standard
from concurrent.futures import ThreadPoolExecutor
from typing import Any
import threading

# Third Party
import pytest
import torch

# First Party
from lmcache.v1.platform.devices.rbln import copy_costs
from lmcache.v1.platform.devices.rbln.copy_costs import HARDWARE_COSTS, CopyCosts
from lmcache.v1.platform.devices.rbln.staging import BUFFER_BYTES

#: Layers, planes, and bytes of a head-block per token, K/V-first, in bfloat16.
GEOMETRIES = {
    "qwen3-1.7b": (28, 2, 8 * 128 * 2),
    "llama-8b": (32, 2, 8 * 128 * 2),
    "llama-70b-tp8": (80, 2, 128 * 2),
    "mha-64": (32, 2, 64 * 128 * 2),
    "mla": (61, 1, 576 * 2),
}


def test_times_are_those_of_the_figures() -> None:
    costs = CopyCosts(17.0, 1.0, host_gbps=58.0, device_gbps=240.0)
    assert costs.direct_us(58_000_000, 10) == pytest.approx(1170.0)
    # Inside the device 10 us and 241.67 us, then two copies to the host.
    staged = costs.device_staged_us(58_000_000, 10, 30_000_000)
    assert staged == pytest.approx(10 + 58_000 / 240 + 34 + 1000)


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("blocks", [1, 2, 4, 16])
@pytest.mark.parametrize("block_size", [256, 512, 1024])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_cheaper_way_is_near_the_speed_of_the_link(
    name: str, block_size: int, blocks: int, itemsize: int
) -> None:
    layers, planes, token_bytes = GEOMETRIES[name]
    piece = block_size * token_bytes * itemsize // 2
    pieces = layers * planes * blocks
    num_bytes = pieces * piece
    # What is larger than a part of a staging buffer is split into parts.
    descriptors = num_bytes // min(piece, 2 << 20)
    cheaper = min(
        HARDWARE_COSTS.direct_us(num_bytes, descriptors),
        HARDWARE_COSTS.device_staged_us(num_bytes, descriptors, BUFFER_BYTES),
    )
    assert cheaper <= 1.5 * num_bytes / 58e3


def test_small_pieces_are_collected_and_large_ones_are_not() -> None:
    def collects(piece: int, costs: CopyCosts) -> bool:
        num_bytes = 100 * piece
        staged = costs.device_staged_us(num_bytes, 100, BUFFER_BYTES)
        return staged < costs.direct_us(num_bytes, 100)

    # 17 us is the time of 4 MB inside the device, less what buffers cost.
    assert collects(2 << 20, HARDWARE_COSTS)
    assert not collects(3 << 20, HARDWARE_COSTS)
    # Nothing is gained where copies inside the device cost as much.
    assert not collects(1 << 10, CopyCosts(17.0, 17.0))


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start a measurement of copies whose times a test gives, host and device."""
    monkeypatch.setattr(copy_costs, "_measured", {})
    memory = torch.zeros(4096, dtype=torch.uint8)

    def start(fixed_us: Any) -> CopyCosts | None:
        monkeypatch.setattr(copy_costs, "_fixed_us", fixed_us)
        return copy_costs.measured_costs(memory, memory.clone(), memory.clone(), None)

    return start


class Times:
    """Times of copies: to the host and inside the device by turns."""

    def __init__(self, *rounds: tuple[float, float]) -> None:
        self.calls = 0
        self._times = [time for both in rounds for time in both]

    def __call__(self, *_: object) -> float:
        self.calls += 1
        return self._times[(self.calls - 1) % len(self._times)]


@pytest.mark.parametrize(
    ("rounds", "link_us"),
    [
        # The least times, however many rounds were slower.
        ([(300.0, 283.0), (20.0, 3.0), (29.0, 12.0)], 17.0),
        # Too near to one another to tell anything.
        ([(5.0, 3.0)], 0.0),
        # Others were in the way all the time.
        ([(293.0, 1.0)], 17.0),
    ],
)
def test_costs_are_measured_once(
    measure: Any, rounds: list[tuple[float, float]], link_us: float
) -> None:
    times = Times(*rounds)
    for _ in range(2):
        costs = measure(times)
        assert costs.host_descriptor_us == link_us
    assert times.calls == 2 * copy_costs._ROUNDS
    # The figures of the links are not measured.
    assert (costs.host_gbps, costs.device_gbps) == (58.0, 240.0)
    assert copy_costs.known_costs(torch.device("cpu")) == costs


def test_hopeless_copies_are_not_measured_for_long(measure: Any) -> None:
    times = Times((9000.0, 10.0))
    measure(times)
    assert times.calls == 2


def test_nobody_waits_for_who_measures(measure: Any) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> float:
        began.set()
        assert go_on.wait(60)
        return 1.0

    with ThreadPoolExecutor(1) as executor:
        first = executor.submit(measure, slow)
        assert began.wait(60)
        try:
            assert measure(slow) is None
        finally:
            go_on.set()
        assert first.result(60) is not None


def test_after_a_failure_the_next_one_measures(measure: Any) -> None:
    def fail(*_: object) -> float:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        measure(fail)
    assert measure(Times((20.0, 3.0))) is not None
