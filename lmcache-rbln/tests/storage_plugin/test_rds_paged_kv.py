# SPDX-License-Identifier: Apache-2.0
"""From the paged cache to the NVMe and back: the connector and the backend together."""

# Standard
from collections.abc import Callable
import random

# Third Party
from kv_reference import LAYOUTS, Case, Layout, assert_same_bytes, random_bits, upload
from rds_support import Engine, key_of, metadata_of
import pytest
import torch

# First Party
from lmcache_rbln.paged_kv import RBLNPagedKVConnector

pytestmark = [pytest.mark.npu, pytest.mark.deferred]
BLOCK = 16


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("tail", [0, 5])
def test_a_request_comes_back_into_other_blocks(
    engine: Callable[..., Engine], layout: Layout, blocks_per_chunk: int, tail: int
) -> None:
    case = Case(layout, num_blocks=16, block_size=BLOCK, head_size=64)
    chunk = blocks_per_chunk * BLOCK
    metadata = metadata_of(
        kv_dtype=case.dtype,
        kv_shape=(case.num_layers, case.planes, chunk, case.heads, case.head_size),
        use_mla=layout == "mla",
        chunk_size=chunk,
    )
    one = engine({"rds_buffer_size": 1}, metadata)
    connector = RBLNPagedKVConnector(metadata)
    host = [random_bits(case.layer_shape, case.dtype, n) for n in range(2)]
    layers = [upload(layer, "rbln:0") for layer in host]
    axis = 1 if layout == "kv_first" else 0
    ids = random.Random(tail).sample(range(16), 12)
    source, target = ids[:6], ids[6:]
    length = 6 * BLOCK - (BLOCK - tail if tail else 0)
    starts = list(range(0, length, chunk))
    ends = [min(start + chunk, length) for start in starts]
    keys = [key_of(start) for start in starts]

    def slots(blocks: list[int]) -> torch.Tensor:
        return torch.tensor([b * BLOCK + t for b in blocks for t in range(BLOCK)])

    objs = []
    for start, end in zip(starts, ends, strict=True):
        obj = one.backend.allocate(
            metadata.get_shapes(end - start), metadata.get_dtypes(), None
        )
        assert obj is not None
        objs.append(obj)
    connector.batched_from_gpu(
        objs, starts, ends, kvcaches=layers, slot_mapping=slots(source)
    )
    futures = one.backend.batched_submit_put_task(keys, objs)
    for obj in objs:
        obj.ref_count_down()
    # The next forward uses the blocks at once; the store must not see it.
    zeros = torch.zeros(case.layer_shape, dtype=torch.float32).to(case.dtype)
    for layer in layers:
        layer.copy_(zeros)
    assert futures is not None
    futures[0].result(timeout=30)

    assert one.backend.batched_contains(keys) == len(keys)
    back = one.backend.batched_get_blocking(keys)
    assert None not in back
    cached = BLOCK  # vLLM holds the first block already
    connector.batched_to_gpu(
        back,
        starts,
        ends,
        kvcaches=layers,
        slot_mapping=slots(target),
        vllm_cached_tokens=cached,
    )
    for obj in back:
        assert obj is not None
        obj.ref_count_down()
    torch.rbln.synchronize()  # type: ignore[attr-defined]
    for layer, twin in zip(layers, host, strict=True):
        want = zeros.clone()
        for old, new in list(zip(source, target, strict=True))[1:]:
            want.select(axis, new).copy_(twin.select(axis, old))
        got = layer.cpu()
        if tail:  # what lies behind the last token is nobody's
            for tensor in (got, want):
                last = tensor.select(axis, target[5])
                last[..., tail:, :] = 0
        assert_same_bytes(got, want)
    one.assert_idle()
