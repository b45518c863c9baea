# SPDX-License-Identifier: Apache-2.0
"""``rebel.triton``: what vllm-rbln's kernel files need to be imported.

The kernels never run as such: the ``rbln`` backend computes the operators they
belong to (see :func:`rebel.ops.torch_custom_ops.attn.custom_kernel`).
"""

from collections.abc import Callable
from typing import Any

from .._unsupported import missing_attribute, not_simulated
from . import language

__all__ = ["jit", "language"]


class _Kernel:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__ = function.__name__

    def warmup(self, *args: Any, **kwargs: Any) -> Any:
        """Build the kernel: not simulated.

        Raises:
            NotImplementedError: Always.
        """
        raise not_simulated(
            f"running the kernel rbln_triton_ops.{self.__name__} by itself",
            "compile the model (no enforce_eager), or turn custom kernels off",
        )


def jit(function: Callable[..., Any]) -> _Kernel:
    """Declare a kernel.

    Args:
        function: The kernel's body, in Triton's language.

    Returns:
        An object with the kernel's name, which refuses to be built.
    """
    return _Kernel(function)


__getattr__ = missing_attribute("rebel.triton")
