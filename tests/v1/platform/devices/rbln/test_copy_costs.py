# SPDX-License-Identifier: Apache-2.0
"""Direct copies against device-staged ones, at the hardware's figures."""

# Standard
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock
import threading

# Third Party
import pytest
import torch

# First Party
from lmcache.v1.platform.devices.rbln import copy_costs
from lmcache.v1.platform.devices.rbln.copy_costs import (
    HARDWARE_DESCRIPTOR_US,
    collecting_pays,
)
from lmcache.v1.platform.devices.rbln.staging import BUFFER_BYTES

#: Layers, planes, and bytes of a head-block per token, K/V-first, in bfloat16.
GEOMETRIES = {
    "qwen3-1.7b": (28, 2, 8 * 128 * 2),
    "llama-8b": (32, 2, 8 * 128 * 2),
    "llama-70b-tp8": (80, 2, 128 * 2),
    "mha-64": (32, 2, 64 * 128 * 2),
    "mla": (61, 1, 576 * 2),
}


def times_us(num_bytes: int, segments: int) -> tuple[float, float]:
    """Return how long direct and collected copies take, by the hardware's figures."""
    link = num_bytes / 58e3
    crossings = -(-num_bytes // BUFFER_BYTES)
    return segments * 17.0 + link, num_bytes / 240e3 + crossings * 17.0 + link


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
    direct, collected = times_us(num_bytes, descriptors)
    collects = collecting_pays(
        num_bytes, descriptors, BUFFER_BYTES, HARDWARE_DESCRIPTOR_US
    )
    assert collects == (collected < direct)
    cheaper = collected if collects else direct
    assert cheaper <= 1.5 * num_bytes / 58e3


def test_small_segments_are_collected_and_large_ones_are_not() -> None:
    def collects(segment: int, descriptor_us: float) -> bool:
        return collecting_pays(100 * segment, 100, BUFFER_BYTES, descriptor_us)

    # 17 us is the time of 4 MB inside the device, less what buffers cost.
    assert collects(2 << 20, HARDWARE_DESCRIPTOR_US)
    assert not collects(3 << 20, HARDWARE_DESCRIPTOR_US)
    # Nothing is gained where copies to the host cost no more than their bytes.
    assert not collects(1 << 10, 0.0)


DEVICE = torch.device("cpu")


@pytest.fixture(autouse=True)
def not_measured_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_costs, "_measured", {})


@pytest.mark.parametrize(
    ("times", "link_us"),
    [
        ((20.0, 3.0), 17.0),
        ((29.0, 12.0), 17.0),
        # Too near to one another to tell anything.
        ((5.0, 3.0), 0.0),
        # Others were in the way all the time.
        ((293.0, 1.0), 17.0),
    ],
)
def test_costs_are_measured_once(times: tuple[float, float], link_us: float) -> None:
    measure = MagicMock(return_value=times)
    for _ in range(2):
        cost = copy_costs.measured_us(DEVICE, measure)
        assert cost == pytest.approx(link_us)
    measure.assert_called_once()
    assert copy_costs.known_us(DEVICE) == cost


def test_nobody_waits_for_who_measures() -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow() -> tuple[float, float]:
        began.set()
        assert go_on.wait(60)
        return 1.0, 1.0

    with ThreadPoolExecutor(1) as executor:
        first = executor.submit(copy_costs.measured_us, DEVICE, slow)
        assert began.wait(60)
        try:
            assert copy_costs.measured_us(DEVICE, slow) is None
        finally:
            go_on.set()
        assert first.result(60) is not None


def test_after_a_failure_the_next_one_measures() -> None:
    def fail() -> tuple[float, float]:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        copy_costs.measured_us(DEVICE, fail)
    assert copy_costs.measured_us(DEVICE, lambda: (20.0, 3.0)) is not None
