# SPDX-License-Identifier: Apache-2.0
"""What has not been tested together is refused by name."""

# Standard
from types import SimpleNamespace
from typing import Any

# Third Party
import pytest
from vllm.config import ParallelConfig

# First Party
from lmcache_rbln.integration.vllm.combinations import require_tested
from lmcache_rbln.integration.vllm import combinations


def vllm_config(speculative: Any = None, **parallel: Any) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel), speculative_config=speculative
    )


def test_tensor_parallelism_is_tested() -> None:
    require_tested(
        vllm_config(
            tensor_parallel_size=2,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_index=0,
        )
    )


@pytest.mark.parametrize(
    ("parallel", "what", "argument"),
    [
        ("pipeline_parallel_size", "pipeline", "--pipeline-parallel-size 1"),
        ("data_parallel_size", "data", "--data-parallel-size 1"),
        (
            "prefill_context_parallel_size",
            "context",
            "--prefill-context-parallel-size 1",
        ),
        ("decode_context_parallel_size", "context", "--decode-context-parallel-size 1"),
    ],
)
def test_other_parallelism(parallel: str, what: str, argument: str) -> None:
    with pytest.raises(ValueError, match=rf"{what} parallelism \(2\).*{argument}"):
        require_tested(vllm_config(**{parallel: 2}))


def test_a_rank_of_data_parallelism_that_vllm_made_independent() -> None:
    """vLLM gives a dense model's rank a size of one."""
    config = vllm_config(data_parallel_size=1, data_parallel_index=1)
    with pytest.raises(ValueError, match="data parallelism .*--data-parallel-size 1"):
        require_tested(config)


def test_speculative_decoding() -> None:
    config = vllm_config(SimpleNamespace(method="ngram"))
    with pytest.raises(ValueError, match=r"speculative decoding \(ngram\)"):
        require_tested(config)


def test_vllm_s_own_configuration_has_these_names() -> None:
    made = ParallelConfig()
    for name, _, _ in combinations._PARALLEL:
        assert getattr(made, name) == 1
    assert made.data_parallel_index == 0
    require_tested(vllm_config(**vars(made)))
