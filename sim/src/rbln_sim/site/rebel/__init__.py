# SPDX-License-Identifier: Apache-2.0
"""Simulated `rebel`: what vllm-rbln 0.12 and torch-rbln 0.12 import when serving.

Written from the public call sites of those two packages; the closed
`rebel-compiler` was neither available nor used. Graphs run on the host, over the
bytes of the simulated device (see :mod:`rebel.core.torch_compile`).
"""

from typing import Any

from . import flags, profiler
from ._random import manual_seed
from ._unsupported import missing_attribute, not_simulated
from .compile_context import CompileContext
from .device_info import get_npu_name

__all__ = [
    "CompileContext",
    "__version__",
    "compile",
    "flags",
    "get_npu_name",
    "manual_seed",
    "profiler",
]

__version__ = "0.12.0"


def compile(*args: Any, **kwargs: Any) -> Any:
    """Compile a model ahead of time: not simulated.

    Raises:
        NotImplementedError: Always.
    """
    raise not_simulated(
        "rebel.compile", "use torch.compile(..., backend='rbln'), which is"
    )


__getattr__ = missing_attribute("rebel")
