# SPDX-License-Identifier: Apache-2.0
"""The ``rbln`` backend of ``torch.compile``, on the host.

A graph runs over the bytes of the simulated device: inputs, weights and buffers
are aliased, so writes into a KV cache land in device memory. It runs in stream
order, behind the copies already queued on the calling thread's current stream, and
is complete when the call returns.
"""

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._dynamo import register_backend

from .. import ops  # noqa: F401  # registers the custom operators that graphs hold
from .._unsupported import missing_attribute, not_simulated
from . import program_capture
from ._graph import host_graph
from ._runtime import Runtime

__all__ = ["rbln_backend"]


def _refuse_options(options: dict[str, Any]) -> None:
    mode = options.get("mode") or []
    if "compile_only" in ([mode] if isinstance(mode, str) else mode):
        raise not_simulated(
            "the compile option mode='compile_only'", "unset VLLM_RBLN_COMPILE_ONLY"
        )
    if options.get("dtype"):
        raise not_simulated(
            f"the compile option dtype={options['dtype']!r}", "leave it unset"
        )


def rbln_backend(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
) -> Runtime:
    """Compile one graph.

    Args:
        graph_module: The graph that Dynamo traced.
        example_inputs: Its (fake) inputs; not used.
        kwargs: ``options`` of ``torch.compile``. The runtime is appended to the
            list ``_runtime_holder`` if there is one; options that concern speed,
            caching or placement have no effect here.

    Returns:
        The callable that runs the graph.

    Raises:
        NotImplementedError: The graph or an option is not simulated.
    """
    options: dict[str, Any] = kwargs.get("options") or {}
    _refuse_options(options)
    runtime = Runtime(host_graph(graph_module))
    holder = options.get("_runtime_holder")
    if holder is not None:
        holder.append(runtime)
    program_capture.record(graph_module, runtime)
    return runtime


register_backend(name="rbln", compiler_fn=rbln_backend)

__getattr__ = missing_attribute("rebel.core.torch_compile")
