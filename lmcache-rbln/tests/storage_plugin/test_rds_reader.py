# SPDX-License-Identifier: Apache-2.0
"""Restores: what a chunk was stored as, and how long memory for it is waited for."""

# Third Party
from rds_support import (
    MakeEngine,
    key_of,
    metadata_of,
)
import pytest
import torch

# First Party
from lmcache.v1.memory_management import MemoryFormat

pytestmark = pytest.mark.npu


def test_a_short_chunk_keeps_its_shape(engine: MakeEngine) -> None:
    one = engine()
    shapes = [torch.Size([2, 2, 50, 128])]
    obj = one.backend.allocate(shapes, [torch.bfloat16], None)
    assert obj is not None and obj.tensor is not None
    data = torch.randint(0, 100, shapes[0]).to(torch.bfloat16)
    obj.tensor.copy_(data)
    futures = one.backend.batched_submit_put_task([key_of(1)], [obj])
    obj.ref_count_down()
    assert futures is not None
    futures[0].result(timeout=10)
    back = one.backend.get_blocking(key_of(1))
    assert back is not None and back.tensor is not None
    assert back.get_shape() == shapes[0]
    assert torch.equal(back.tensor.cpu(), data)
    back.ref_count_down()
    one.assert_idle()


def test_mla_format_is_kept(engine: MakeEngine) -> None:
    metadata = metadata_of(kv_shape=(2, 1, 128, 1, 64), use_mla=True)
    one = engine(metadata=metadata)
    obj = one.backend.allocate(
        metadata.get_shapes(), metadata.get_dtypes(), MemoryFormat.KV_MLA_FMT
    )
    assert obj is not None
    futures = one.backend.batched_submit_put_task([key_of(1)], [obj])
    obj.ref_count_down()
    assert futures is not None
    futures[0].result(timeout=10)
    back = one.backend.get_blocking(key_of(1))
    assert back is not None
    assert back.get_memory_format() == MemoryFormat.KV_MLA_FMT
    back.ref_count_down()


def test_staging_memory_that_stays_taken_ends_the_wait(engine: MakeEngine) -> None:
    one = engine({"rds_wait_timeout": 0.05})
    one.store(0, 1)
    slots = one.backend.calculate_chunk_budget()
    held = [one.chunk(10 + number) for number in range(slots - 1)]
    failures = one.metric("staging_failures")
    assert one.load(0, 1) == [True, False]
    last = one.chunk(99)
    shapes, dtypes = one.metadata.get_shapes(), one.metadata.get_dtypes()
    assert one.backend.allocate(shapes, dtypes) is None  # at once: nothing is written
    assert one.metric("staging_failures") == failures + 2
    for obj in [*held, last]:
        obj.ref_count_down()
    assert one.load(0, 1) == [True, True]
    one.assert_idle()
