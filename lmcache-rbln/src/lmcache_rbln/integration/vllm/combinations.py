# SPDX-License-Identifier: Apache-2.0
"""Ways to serve that this connector has not been tested with, and so refuses.

The table "What works together" in ``docs/source/mp/rbln.rst`` has the others, each with
its tests.
"""

# Future
from __future__ import annotations

# Standard
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Third Party
    from vllm.config import VllmConfig

#: Attribute of vLLM's parallel configuration, what it is, the argument that sets it.
_PARALLEL = (
    (
        "pipeline_parallel_size",
        "pipeline parallelism",
        "--pipeline-parallel-size",
    ),
    ("data_parallel_size", "data parallelism", "--data-parallel-size"),
    (
        "prefill_context_parallel_size",
        "context parallelism",
        "--prefill-context-parallel-size",
    ),
    (
        "decode_context_parallel_size",
        "context parallelism",
        "--decode-context-parallel-size",
    ),
)


def require_tested(vllm_config: VllmConfig) -> None:
    """Refuse what has not been tested together with this connector.

    Args:
        vllm_config: vLLM's configuration.

    Raises:
        ValueError: Naming the argument of ``vllm serve`` to change.
    """
    parallel = vllm_config.parallel_config
    for name, what, argument in _PARALLEL:
        if (size := getattr(parallel, name, 1)) > 1:
            raise _untested(f"{what} ({size})", f"{argument} 1")
    # vLLM makes independent engines of the ranks of a dense model, each with a size of
    # one. All but the first can tell, and none serves without the others.
    if getattr(parallel, "data_parallel_index", 0) > 0:
        raise _untested("data parallelism", "--data-parallel-size 1")
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None:
        method = getattr(speculative, "method", None)
        raise _untested(f"speculative decoding ({method})", "no --speculative-config")


def _untested(what: str, wanted: str) -> ValueError:
    return ValueError(
        f"{what} is not supported by RBLNLMCacheConnectorV1, wanted {wanted}; change "
        "that, or serve without --kv-transfer-config"
    )
