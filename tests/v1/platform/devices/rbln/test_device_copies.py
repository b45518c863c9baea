# SPDX-License-Identifier: Apache-2.0
"""Whole blocks between the KV cache and chunks on the same device."""

# Third Party
from kv_reference import LAYOUTS, Case, Layout, assert_same_bytes, random_bits, upload
import pytest
import torch

# First Party
from lmcache.lmcache_native import TransferDirection
from lmcache.v1.platform.devices.rbln import staging
from lmcache.v1.platform.devices.rbln.device_ops import RblnDeviceOps

pytestmark = [pytest.mark.npu, pytest.mark.deferred]

D2H, H2D = TransferDirection.D2H, TransferDirection.H2D


def laid_out(layers: list[torch.Tensor], axis: int, ids: list[int]) -> torch.Tensor:
    """Return what a chunk of blocks holds, by plain indexing."""
    return torch.stack(
        [layer.index_select(axis, torch.tensor(ids)) for layer in layers]
    ).flatten()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_go_to_the_device_and_come_back(layout: Layout) -> None:
    case = Case(layout, 3, 9)
    axis = 1 if layout == "kv_first" else 0
    layers = [random_bits(case.layer_shape, case.dtype, i) for i in range(3)]
    on_device = [upload(layer, "rbln:0") for layer in layers]
    tables = [[4, 5, 0], [8, 2]]
    wanted = [laid_out(layers, axis, ids) for ids in tables]
    chunks = [upload(torch.zeros_like(chunk), "rbln:0") for chunk in wanted]
    stream = torch.rbln.Stream("rbln:0")
    new = [random_bits(case.layer_shape, case.dtype, 40 + i) for i in range(3)]
    with torch.rbln.stream(stream):
        RblnDeviceOps().copy_blocks_on_device(
            on_device, chunks, tables, D2H, case.engine_kv_format, [0, 0]
        )
        assert stream.query()
        assert_same_bytes([chunk.cpu() for chunk in chunks], wanted)
        # Behind what the caller's stream has to do.
        pinned = [layer.pin_memory() for layer in new]
        for layer, values in zip(on_device, pinned, strict=True):
            layer.copy_(values, non_blocking=True)
        RblnDeviceOps().copy_blocks_on_device(
            on_device, chunks, [[1, 3, 6], [0, 7]], H2D, case.engine_kv_format, [1, 0]
        )
    for layer, values in zip(layers, new, strict=True):
        for to, come in ((3, 5), (6, 0), (0, 8), (7, 2)):
            values.select(axis, to).copy_(layer.select(axis, come))
    assert_same_bytes([layer.cpu() for layer in on_device], new)
    assert staging.arena().in_use() == (0, 0)


def test_what_does_not_fit_is_refused() -> None:
    case = Case("mla", 2, 4)
    layers = [upload(torch.zeros(case.layer_shape, dtype=case.dtype), "rbln:0")] * 2
    small = upload(torch.zeros(8, dtype=case.dtype), "rbln:0")
    with pytest.raises(ValueError, match="one dense axis of 256 bytes"):
        RblnDeviceOps().copy_blocks_on_device(
            layers, [small], [[0, 1]], D2H, case.engine_kv_format, [0]
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_in_host_memory_has_its_chunks_there(layout: Layout) -> None:
    case = Case(layout, 2, 4)
    layers = [random_bits(case.layer_shape, case.dtype, i) for i in range(2)]
    wanted = laid_out(layers, 1 if layout == "kv_first" else 0, [2, 0])
    chunk = torch.zeros_like(wanted)
    RblnDeviceOps().copy_blocks_on_device(
        layers, [chunk], [[2, 0]], D2H, case.engine_kv_format, [0]
    )
    assert_same_bytes([chunk], [wanted])
