# SPDX-License-Identifier: Apache-2.0
"""Turn a graph that Dynamo traced on ``rbln`` into one that runs on the host."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._device import on_device
from .._unsupported import not_simulated
from ..ops._exact import EXACT_FUNCTIONS, EXACT_METHODS
from ..ops.torch_custom_ops.attn import custom_kernel

_TRITON_NAMESPACE = "rbln_triton_ops::"
_COPIES_ACROSS = frozenset({"to", "cpu", torch.ops.aten._to_copy.default})


@dataclass(frozen=True)
class HostGraph:
    """A graph over host tensors.

    Attributes:
        forward: Takes the graph's inputs and returns its outputs.
        output_devices: For each output its ``rbln`` device, or None when it stays
            on the host or is no tensor.
    """

    forward: Callable[..., Sequence[Any]]
    output_devices: tuple[torch.device | None, ...]


def _example(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _device_of(node: Any) -> torch.device | None:
    example = _example(node)
    return example.device if isinstance(example, torch.Tensor) else None


def _on_host(argument: Any) -> Any:
    if isinstance(argument, torch.device) and argument.type == "rbln":
        return torch.device("cpu")
    if isinstance(argument, str) and (
        argument == "rbln" or argument.startswith("rbln:")
    ):
        return "cpu"
    return argument


def _operator_name(target: Any) -> str:
    packet = getattr(target, "_overloadpacket", target)
    return getattr(packet, "_qualified_op_name", "")


def _lower_target(node: fx.Node) -> None:
    """Replace what the host's own operator would compute otherwise."""
    if node.op == "call_method":
        exact = EXACT_METHODS.get(str(node.target))
        if exact is not None:
            node.op, node.target = "call_function", exact
        return
    name = _operator_name(node.target)
    if name.startswith(_TRITON_NAMESPACE):
        node.target = _named(custom_kernel(name.removeprefix(_TRITON_NAMESPACE)), name)
    elif node.target in EXACT_FUNCTIONS:
        node.target = EXACT_FUNCTIONS[node.target]


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    # fx writes the graph as Python source and needs a name for each function.
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = name.replace("::", "_").replace(".", "_")
    return call


def _keep_copies(graph: fx.Graph) -> None:
    """Let a copy across devices stay a copy once both sides are host tensors."""
    for node in list(graph.nodes):
        if node.target not in _COPIES_ACROSS or not node.args:
            continue
        source, result = _device_of(node.args[0]), _device_of(node)
        if source is None or result is None or source == result:
            continue
        with graph.inserting_after(node):
            clone = graph.call_function(torch.clone, (node,))
        clone.meta = copy.copy(node.meta)
        node.replace_all_uses_with(clone)
        clone.replace_input_with(clone, node)


def _refuse_what_the_module_owns(module: fx.GraphModule, node: fx.Node) -> None:
    """Dynamo of torch 2.13 makes a module's tensors inputs of the graph."""
    if node.op == "call_module":
        raise not_simulated(f"a graph that calls the module {node.target!r}")
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    if isinstance(value, fx.GraphModule):
        raise not_simulated(
            f"a higher-order operator with the subgraph {node.target!r}"
        )
    if on_device(value):
        raise not_simulated(f"a graph that owns the device tensor {node.target!r}")


def graph_outputs(graph: fx.Graph) -> tuple[Any, ...]:
    """The values a Dynamo graph returns: nodes or constants, in order.

    Args:
        graph: As Dynamo traced it, or a copy.

    Raises:
        TypeError: The graph does not return a tuple, so it is not Dynamo's.
    """
    outputs = graph.output_node().args[0]
    if not isinstance(outputs, (tuple, list)):
        raise TypeError(
            f"a Dynamo graph returns a tuple of values, got {type(outputs).__name__}"
        )
    return tuple(outputs)


def host_graph(module: fx.GraphModule) -> HostGraph:
    """Prepare a traced graph for the host; done once a graph.

    Args:
        module: What Dynamo hands to a backend: nodes carry their fake value in
            ``meta["example_value"]``. It is not changed.

    Returns:
        The graph with devices moved to the host, matrix products made exact and
        custom kernels replaced.

    Raises:
        NotImplementedError: The graph holds something that is not simulated.
    """
    graph = copy.deepcopy(module.graph)
    _keep_copies(graph)
    for node in list(graph.nodes):
        node.args = fx.node.map_aggregate(node.args, _on_host)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _on_host)
        if node.op in ("call_function", "call_method"):
            _lower_target(node)
        elif node.op in ("get_attr", "call_module"):
            _refuse_what_the_module_owns(module, node)
    devices = tuple(
        device if device is not None and device.type == "rbln" else None
        for device in map(_device_of, graph_outputs(graph))
    )
    runnable = fx.GraphModule(module, graph)
    return HostGraph(runnable.forward, devices)
