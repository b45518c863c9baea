# SPDX-License-Identifier: Apache-2.0
"""``torch.rbln.capture_programs``: the graphs built while a scope is open.

vllm-rbln sizes its dynamic KV cache from it: the inputs with a dynamic dimension
are the KV caches, and their placement tells what one block costs on each chiplet.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._unsupported import missing_attribute
from ._graph import graph_outputs

__all__ = [
    "CompiledProgram",
    "InputSpec",
    "OutputSpec",
    "PhysicalPlacement",
    "ShardPlacement",
    "capture_programs",
    "record",
]

# RBLN-CR03; the simulator's device memory is spread evenly over them.
_CHIPLETS = 4
# A node is an NPU of the same torch device, and a simulated device has one.
_NODE = 0

# An integer, or ("symbol", name) for a dimension known only at run time.
Dim = int | tuple[str, str]


@dataclass(frozen=True)
class ShardPlacement:
    """A slice of a tensor on one chiplet of one of the device's NPUs."""

    node_id: int
    chiplet_id: int
    slice_shape: tuple[Dim, ...]


@dataclass(frozen=True)
class PhysicalPlacement:
    """Where a tensor with a dynamic dimension lies on the device."""

    shape: tuple[Dim, ...]
    dtype: str
    shards: tuple[ShardPlacement, ...]


@dataclass(frozen=True)
class InputSpec:
    """An input; the placement is None unless a dimension is dynamic."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    physical_placement: PhysicalPlacement | None


@dataclass(frozen=True)
class OutputSpec:
    """An output; outputs are never placed ahead of a run."""

    shape: tuple[int, ...]
    dtype: str
    physical_placement: PhysicalPlacement | None = None


@dataclass(frozen=True)
class CompiledProgram:
    """One compiled graph and how it is called."""

    name: str
    device: torch.device | None
    runtime: Any
    input_specs: tuple[InputSpec, ...]
    output_specs: tuple[OutputSpec, ...]


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.open: list[list[CompiledProgram]] = []


_scopes = _Scopes()


@contextlib.contextmanager
def capture_programs() -> Iterator[list[CompiledProgram]]:
    """Collect the programs that this thread compiles while the scope is open.

    Yields:
        The list they are appended to, in the order they are built.
    """
    programs: list[CompiledProgram] = []
    _scopes.open.append(programs)
    try:
        yield programs
    finally:
        _scopes.open = [scope for scope in _scopes.open if scope is not programs]


def _sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(
        size if isinstance(size, int) else int(size.node.hint) for size in tensor.shape
    )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _placement(tensor: torch.Tensor) -> PhysicalPlacement | None:
    shape: tuple[Dim, ...] = tuple(
        size if isinstance(size, int) else ("symbol", str(size))
        for size in tensor.shape
    )
    if all(isinstance(dim, int) for dim in shape):
        return None
    last = shape[-1]
    if not isinstance(last, int) or last % _CHIPLETS:
        raise ValueError(
            f"the last dimension of a tensor with a dynamic dimension must be a "
            f"multiple of {_CHIPLETS} (chiplets), got the shape {shape}"
        )
    piece = (*shape[:-1], last // _CHIPLETS)
    shards = tuple(ShardPlacement(_NODE, chip, piece) for chip in range(_CHIPLETS))
    return PhysicalPlacement(shape, _dtype(tensor), shards)


def record(graph_module: fx.GraphModule, runtime: Any) -> None:
    """Tell every open scope of this thread about a program.

    Args:
        graph_module: The graph as Dynamo traced it.
        runtime: The callable built for it.
    """
    if not _scopes.open:
        return
    values = [
        (node.name, node.meta.get("example_value"))
        for node in graph_module.graph.nodes
        if node.op == "placeholder"
    ]
    tensors = [(name, v) for name, v in values if isinstance(v, torch.Tensor)]
    devices = [v.device for _, v in tensors if v.device.type == "rbln"]
    results = [
        node.meta.get("example_value")
        for node in graph_outputs(graph_module.graph)
        if isinstance(node, fx.Node)
    ]
    compile_id = torch._guards.CompileContext.current_compile_id()
    program = CompiledProgram(
        name=str(compile_id) if compile_id is not None else "",
        device=devices[0] if devices else None,
        runtime=runtime,
        input_specs=tuple(
            InputSpec(name, _sizes(value), _dtype(value), _placement(value))
            for name, value in tensors
        ),
        output_specs=tuple(
            OutputSpec(_sizes(value), _dtype(value))
            for value in results
            if isinstance(value, torch.Tensor)
        ),
    )
    for scope in _scopes.open:
        scope.append(program)


__getattr__ = missing_attribute("rebel.core.program_capture")
