# SPDX-License-Identifier: Apache-2.0
"""Registration of an operator for host tensors, device tensors and tracing."""

from collections.abc import Callable
from typing import Any

import torch

from .._device import graph_begin, host_alias, on_device, to_device

Result = torch.Tensor | tuple[torch.Tensor, ...]
#: Returns a tensor, or a tuple of tensors.
Kernel = Callable[..., Any]


def _over_device_bytes(kernel: Kernel) -> Kernel:
    def run(*args: Any, **options: Any) -> Result:
        device = next(a.device for a in args if on_device(a))
        graph_begin(device.index)
        aliases = (host_alias(a) if on_device(a) else a for a in args)
        result = kernel(*aliases, **options)
        if isinstance(result, tuple):
            return tuple(to_device(one, device) for one in result)
        return to_device(result, device)

    return run


def define(
    library: torch.library.Library, schema: str, kernel: Kernel, fake: Kernel
) -> None:
    """Define an operator that returns new tensors.

    Args:
        library: Fragment of the namespace to define it in.
        schema: Schema without the namespace, as ``Library.define`` takes it.
        kernel: Implementation on CPU tensors. Device tensors reach it as aliases
            of the device's bytes, so writes into an argument land on the device.
        fake: Shape function for tracing.
    """
    name = schema.split("(", 1)[0]
    qualified = f"{library.ns}::{name}"
    library.define(schema)
    library.impl(name, kernel, "CPU")
    # torch-rbln brings its own entry for a few operators (it compiles a graph of
    # one node, which comes back to the CPU kernel); replacing it would warn.
    if not torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "PrivateUse1"):
        library.impl(name, _over_device_bytes(kernel), "PrivateUse1")
    torch.library.register_fake(qualified, fake, lib=library)


def define_attention(
    library: torch.library.Library, schema: str, kernel: Kernel, fake: Kernel
) -> None:
    """Define an operator that also takes ``is_prompt_sorted``, as vllm-rbln 0.12.1 has.

    That a batch is sorted by length changes how an NPU computes, and not what.

    Args:
        library: See :func:`define`.
        schema: See :func:`define`; without that option.
        kernel: See :func:`define`; gets the other arguments.
        fake: Likewise.
    """

    def without(function: Kernel) -> Kernel:
        return lambda *args, is_prompt_sorted=False: function(*args)

    arguments, arrow, result = schema.rpartition(") -> ")
    schema = f"{arguments}, *, bool is_prompt_sorted=False{arrow}{result}"
    define(library, schema, without(kernel), without(fake))
