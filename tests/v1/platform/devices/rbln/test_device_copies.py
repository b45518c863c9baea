# SPDX-License-Identifier: Apache-2.0
"""Copies of many regions in one call: native, or by Python where that is missing."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock
import sys

# Third Party
from hypothesis import given
from hypothesis import strategies as st
from kv_reference import LAYOUTS, Case, Layout, check_both_directions
import pytest
import torch

# First Party
from lmcache import kv_copies
from lmcache.v1.platform.devices.rbln import device_copies

#: Elements of each layer of these tests' buffers, between gaps of other memory.
LAYER = 40


@pytest.fixture
def no_extension(monkeypatch: pytest.MonkeyPatch) -> Iterator[MagicMock]:
    """Hide the extension; the logger."""
    monkeypatch.setitem(sys.modules, "lmcache.kv_copies", None)
    logger = MagicMock()
    monkeypatch.setattr(device_copies, "logger", logger)
    device_copies._native.cache_clear()
    yield logger
    device_copies._native.cache_clear()


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """Draw regions of some layers that do not overlap."""
    layers = draw(st.integers(1, 4))
    regions = []
    for layer in range(layers):
        start = 0
        while start < LAYER:
            start += draw(st.integers(0, 7))
            size = draw(st.integers(1, 9))
            if start + size > LAYER:
                break
            regions.append((layer, start, size))
            start += size
    order = draw(st.permutations(regions))
    return {
        "layers": layers,
        "regions": order,
        "offset": draw(st.integers(0, 3)),
        "dtype": draw(st.sampled_from([torch.uint8, torch.int16, torch.int64])),
    }


def make_layers(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return layers that lie inside of one buffer, with memory around each."""
    values = torch.arange(count * (LAYER + 5) + 2) % 251
    buffer = values.to(dtype)
    return [buffer[2 + i * (LAYER + 5) :][:LAYER] for i in range(count)]


@given(batch=batches(), to_host=st.booleans())
def test_copies_what_plain_indexing_does(batch: dict[str, Any], to_host: bool) -> None:
    layers = make_layers(batch["layers"], batch["dtype"])
    regions = batch["regions"]
    total = sum(size for _, _, size in regions)
    room = torch.arange(1, batch["offset"] + total + 3).neg().to(batch["dtype"])
    staged = room[batch["offset"] : batch["offset"] + total]
    whole = layers[0]._base
    assert whole is not None
    wanted_whole, wanted_room = whole.clone(), room.clone()
    position = batch["offset"]
    for layer, start, size in regions:
        first = 2 + layer * (LAYER + 5) + start
        for i in range(size):
            if to_host:
                wanted_room[position + i] = whole[first + i]
            else:
                wanted_whole[first + i] = room[position + i]
        position += size

    kv_copies.copy_regions(
        layers,
        staged,
        [layer for layer, _, _ in regions],
        [start for _, start, _ in regions],
        [size for _, _, size in regions],
        to_host=to_host,
        non_blocking=False,
    )

    assert torch.equal(room, wanted_room)
    assert torch.equal(whole, wanted_whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_of": [0, 2]}, "region 1 in one of 2 layers"),
        ({"layer_of": [0, -1]}, "region 1 in one of 2 layers"),
        ({"layer_of": [0]}, "as many layers and starts as sizes: 2"),
        ({"starts": [0, -1]}, r"region 1 \(start -1, size 4\)"),
        ({"starts": [0, LAYER + 3]}, r"inside of the 45 elements of its layer"),
        ({"sizes": [4, 0]}, r"region 1 \(start 4, size 0\)"),
        ({"sizes": [4, 1 << 62]}, "region 1"),
        ({"sizes": [4, 5]}, "region 1 inside of staging, which has 8 elements"),
        ({"staged": torch.zeros(8)}, "of one element type"),
        ({"staged": torch.zeros(16, dtype=torch.int64)[::2]}, "one dense axis"),
        ({"staged": torch.zeros(2, 4, dtype=torch.int64)}, "one dense axis"),
    ],
)
def test_refuses_before_the_first_copy(change: dict[str, Any], message: str) -> None:
    layers = make_layers(2, torch.int64)
    arguments: dict[str, Any] = {
        "layers": layers,
        "staged": torch.zeros(8, dtype=torch.int64),
        "layer_of": [0, 1],
        "starts": [0, 4],
        "sizes": [4, 4],
        "to_host": True,
        "non_blocking": False,
    }
    arguments |= change
    with pytest.raises(ValueError, match=message):
        kv_copies.copy_regions(**arguments)
    assert not arguments["staged"].any()


@pytest.mark.npu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_python_copies_the_same_and_says_so_once(
    no_extension: MagicMock, layout: Layout
) -> None:
    case = Case(layout, 2, 6, 2, 16, 32, torch.bfloat16)
    for _ in range(2):
        check_both_directions(case, "rbln:0", [4, 0, 1, 3], 2)
    no_extension.warning.assert_called_once()
    message = no_extension.warning.call_args.args
    assert "lmcache.kv_copies" in message[0] % message[1:]
