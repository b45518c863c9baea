# SPDX-License-Identifier: Apache-2.0
"""KV cache groups that a registration refuses, from vLLM's own description of them."""

# Standard
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

# Third Party
import pytest
import torch

# First Party
from lmcache.v1.multiprocess.custom_types import RegisterEngineDrivenContextResponse
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.transfer_context import create_transfer_context
from lmcache.v1.platform.devices.rbln.lmcache_release import HAS_GROUPS

pytestmark = pytest.mark.npu

BLOCK = 8
HEADS, HEAD_SIZE = 2, 8
LAYERS = ("layer.0", "layer.1")


def kv_caches(block_size: int = BLOCK) -> dict[str, torch.Tensor]:
    """Six scheduler blocks of 8 tokens, in the kernel's blocks."""
    blocks = 6 * BLOCK // block_size
    shape = (blocks, 2, HEADS, 1, block_size, HEAD_SIZE)
    return {
        name: torch.zeros(shape, dtype=torch.bfloat16, device="rbln:0")
        for name in LAYERS
    }


def answered(value: Any) -> MessagingFuture[Any]:
    future: MessagingFuture[Any] = MessagingFuture()
    future.set_result(value)
    return future


def register(caches: dict[str, torch.Tensor], groups: Sequence[EngineGroupInfo]) -> Any:
    """Register as LMCache's worker does; returns the client that it talks through."""
    client = MagicMock()
    client.get_chunk_size.return_value = answered(2 * BLOCK)
    client.register_kv_cache_engine_driven_context.return_value = answered(
        RegisterEngineDrivenContextResponse(shm_name="", pool_size=0)
    )
    context = create_transfer_context(caches, instance_id=1, req_client=client)
    try:
        context.register(caches, "model", 1, 2, 10.0, engine_group_infos=groups)
    finally:
        context.close()
    return client


def refused(
    caches: dict[str, torch.Tensor], groups: Sequence[EngineGroupInfo], message: str
) -> None:
    client = MagicMock()
    context = create_transfer_context(caches, instance_id=1, req_client=client)
    with pytest.raises(ValueError, match=message):
        context.register(caches, "model", 1, 2, 10.0, engine_group_infos=groups)
    context.close()
    assert not client.method_calls, "the server was asked"


def vllm_groups(
    caches: dict[str, torch.Tensor], *specs: tuple[tuple[str, ...], Any]
) -> list[EngineGroupInfo]:
    """LMCache's view of groups that vLLM describes."""
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    groups_of = pytest.importorskip("lmcache.integration.vllm.kv_cache_groups")
    config = interface.KVCacheConfig(
        num_blocks=6,
        kv_cache_tensors=[],
        kv_cache_groups=[
            interface.KVCacheGroupSpec(list(names), spec) for names, spec in specs
        ],
    )
    found: list[EngineGroupInfo] = groups_of.create_engine_group_infos_from_vllm(
        config, caches
    )
    return found


def spec(name: str, **sizes: Any) -> Any:
    """One of vLLM's specs of a KV cache, or vLLM-RBLN's."""
    module = pytest.importorskip(
        "vllm_rbln.v1.kv_cache"
        if name.startswith("RBLN")
        else "vllm.v1.kv_cache_interface"
    )
    return getattr(module, name)(
        block_size=BLOCK,
        num_kv_heads=HEADS,
        head_size=HEAD_SIZE,
        dtype=torch.bfloat16,
        **sizes,
    )


def test_full_attention_registers() -> None:
    caches = kv_caches()
    groups = vllm_groups(caches, (LAYERS, spec("FullAttentionSpec")))
    assert [group.tokens_per_block for group in groups] == [BLOCK]
    client = register(caches, groups)
    client.register_kv_cache_engine_driven_context.assert_called_once()


@pytest.mark.parametrize("groups", [[], [EngineGroupInfo(0, (0, 1))]], ids=str)
def test_an_engine_that_does_not_report_its_blocks_registers(
    groups: list[EngineGroupInfo],
) -> None:
    register(kv_caches(), groups)


@pytest.mark.parametrize("name", ["SlidingWindowSpec", "RBLNSlidingWindowSpec"])
@pytest.mark.parametrize("kernel_block", [4, BLOCK])
def test_a_model_of_sliding_windows_alone_is_refused(
    name: str, kernel_block: int
) -> None:
    """The scheduler's blocks are not the tensor's, and some are vLLM's null one."""
    caches = kv_caches(kernel_block)
    groups = vllm_groups(caches, (LAYERS, spec(name, sliding_window=4)))
    refused(caches, groups, f"sliding window of 4 tokens .*{name}.*wanted full attent")


def hybrid(
    second: str, kernel_block: int = BLOCK, **sizes: Any
) -> tuple[dict[str, torch.Tensor], list[EngineGroupInfo]]:
    """A layer of full attention beside another, of the kernel's block size."""
    caches = {LAYERS[0]: kv_caches()[LAYERS[0]]}
    caches[LAYERS[1]] = kv_caches(kernel_block)[LAYERS[1]]
    return caches, vllm_groups(
        caches,
        (LAYERS[:1], spec("FullAttentionSpec")),
        (LAYERS[1:], spec(second, **sizes)),
    )


@pytest.mark.skipif(HAS_GROUPS, reason="LMCache 0.5.7 moves several groups")
def test_hybrid_models_are_refused() -> None:
    caches, groups = hybrid("SlidingWindowSpec", sliding_window=4)
    refused(
        caches,
        groups,
        "hybrid models are not supported on RBLN: .* 2 groups .*a sliding window of 4",
    )


@pytest.mark.skipif(not HAS_GROUPS, reason="LMCache 0.5.6 moves one group")
class TestSeveralGroups:
    """What the second of two groups may be."""

    @pytest.mark.parametrize("window", [BLOCK, 5 * BLOCK + 3])
    def test_a_sliding_window_in_the_scheduler_s_blocks_registers(
        self, window: int
    ) -> None:
        client = register(*hybrid("SlidingWindowSpec", sliding_window=window))
        [call] = client.register_kv_cache_engine_driven_context.mock_calls
        assert len(call.args[0].group_layouts) == 2

    def test_kernel_blocks_unlike_the_scheduler_s_are_refused(self) -> None:
        caches, groups = hybrid("SlidingWindowSpec", 4, sliding_window=4)
        refused(
            caches,
            groups,
            r"group 1 \(layer.1\): a sliding window of 4 tokens .* has blocks of 4 "
            "tokens, wanted the scheduler's block size 8",
        )

    def test_recurrent_state_is_refused(self) -> None:
        groups = [
            EngineGroupInfo(0, (0,), BLOCK),
            EngineGroupInfo(1, (1,), BLOCK, BLOCK, recurrent_state=True),
        ]
        refused(kv_caches(), groups, r"group 1 \(layer.1\): recurrent state .* is not")

    def test_compression_is_refused(self) -> None:
        """Its blocks stand for more tokens than they hold."""
        groups = [EngineGroupInfo(0, (0,), BLOCK), EngineGroupInfo(1, (1,), 4 * BLOCK)]
        refused(kv_caches(), groups, r"group 1 \(layer.1\): .* 8 tokens, wanted .* 32")

    def test_the_window_that_is_shifted_in_place_is_refused_by_its_name(self) -> None:
        """A tensor whose blocks are as large as the window looks like a paged one."""
        edits = pytest.importorskip("lmcache.integration.vllm.kv_cache_group_edits")
        interface = pytest.importorskip("vllm.v1.kv_cache_interface")
        config = interface.KVCacheConfig(
            num_blocks=6,
            kv_cache_tensors=[],
            kv_cache_groups=[
                interface.KVCacheGroupSpec([layer], spec(name, **sizes))
                for layer, name, sizes in (
                    (LAYERS[0], "FullAttentionSpec", {}),
                    (LAYERS[1], "RBLNSlidingWindowSpec", {"sliding_window": BLOCK}),
                )
            ],
        )
        with pytest.raises(ValueError, match="group 1: RBLNSlidingWindowSpec"):
            edits.validate_kv_cache_groups(config)


def test_a_kernel_block_unlike_the_scheduler_s_is_refused() -> None:
    caches = kv_caches(4)
    groups = vllm_groups(caches, (LAYERS, spec("FullAttentionSpec")))
    refused(caches, groups, "blocks of 4 tokens, wanted .* size 8; .*--block-size 4")


def test_recurrent_state_is_refused() -> None:
    groups = [EngineGroupInfo(0, (0, 1), BLOCK, BLOCK, recurrent_state=True)]
    refused(kv_caches(), groups, r"recurrent state \(MambaSpec\) is not supported")
