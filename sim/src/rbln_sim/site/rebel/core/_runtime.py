# SPDX-License-Identifier: Apache-2.0
"""Run a prepared graph over the simulated device's memory."""

import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from .._device import graph_begin, graph_end, host_alias, on_device, to_device
from .._unsupported import not_simulated
from ._graph import HostGraph


class Runtime:
    """What stands behind one compiled graph.

    Runs are synchronous and may overlap in several threads: nothing of a run is
    kept except, as torch-rbln wants, weak references to the tensors bound last.

    Args:
        graph: The prepared graph.
    """

    # torch-rbln drives a graph past Python when there is a native handle.
    _runtime_handle = None

    def __init__(self, graph: HostGraph) -> None:
        self._graph = graph
        self._input_binding = SimpleNamespace(validated=())

    def _bind(self, values: Sequence[Any]) -> tuple[list[Any], dict[int, torch.Tensor]]:
        """Alias device tensors on the host; also by address of their bytes."""
        bound: list[Any] = []
        by_address: dict[int, torch.Tensor] = {}
        for value in values:
            if on_device(value):
                alias = host_alias(value)
                by_address[alias.untyped_storage().data_ptr()] = value
                value = alias
            elif isinstance(value, torch.Tensor) and value.is_meta:
                raise not_simulated(
                    f"a graph over a meta tensor of shape {tuple(value.shape)}",
                    "set VLLM_RBLN_USE_DEVICE_TENSOR=1",
                )
            bound.append(value)
        return bound, by_address

    def _run(self, inputs: Sequence[Any]) -> tuple[Sequence[Any], dict[int, Any]]:
        devices = {v.device.index for v in inputs if on_device(v)}
        devices.update(d.index for d in self._graph.output_devices if d is not None)
        begun = []
        try:
            for device in sorted(devices):
                graph_begin(device)
                begun.append(device)
            bound, by_address = self._bind(inputs)
            with torch.no_grad():
                results = self._graph.forward(*bound)
        finally:
            for device in begun:
                graph_end(device)
        self._input_binding = SimpleNamespace(
            validated=tuple(
                weakref.ref(v) if isinstance(v, torch.Tensor) else None for v in inputs
            )
        )
        return results, by_address

    @staticmethod
    def _export(
        result: Any, device: torch.device | None, by_address: dict[int, torch.Tensor]
    ) -> Any:
        if device is None or not isinstance(result, torch.Tensor):
            return result
        source = by_address.get(result.untyped_storage().data_ptr())
        if source is None or source.dtype != result.dtype:
            return to_device(result, device)
        # The graph returned an input or a view of one: so does the caller get it.
        return source.as_strided(result.shape, result.stride(), result.storage_offset())

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the graph, as Dynamo calls it.

        Args:
            inputs: The graph's inputs in order: tensors or integers (sizes).

        Returns:
            The outputs, each on the device the traced program put it on.
        """
        results, by_address = self._run(inputs)
        devices = self._graph.output_devices
        return tuple(
            self._export(result, device, by_address)
            for result, device in zip(results, devices, strict=True)
        )

    def run(
        self, *inputs: Any, out: Sequence[torch.Tensor] | None = None
    ) -> tuple[Any, ...]:
        """Run the graph into given tensors, as torch-rbln's eager operators do.

        Args:
            inputs: The graph's inputs in order.
            out: Device tensors for the outputs, or None for new ones.

        Returns:
            The outputs.

        Raises:
            ValueError: ``out`` has another length than the outputs, or another shape.
        """
        if out is None:
            return self(*inputs)
        results, _ = self._run(inputs)
        if len(out) != len(results):
            raise ValueError(
                f"the graph has {len(results)} outputs, got {len(out)} tensors in out="
            )
        for target, result in zip(out, results, strict=True):
            if target.shape != result.shape:
                raise ValueError(
                    f"out= must have the shape {tuple(result.shape)}, "
                    f"got {tuple(target.shape)}"
                )
            (host_alias(target) if on_device(target) else target).copy_(result)
        return tuple(out)

    def reset_adaptive_buffers(self) -> None:
        """Forget sizes latched for dynamic dimensions.

        A host graph takes the sizes of every run from its inputs, so there is
        nothing to forget.
        """
