# SPDX-License-Identifier: Apache-2.0
"""Loud failures for everything of `rebel` that is not simulated."""

from collections.abc import Callable
from typing import Any


def missing_attribute(module: str) -> Callable[[str], Any]:
    """Make a module-level ``__getattr__`` that names what was asked for.

    Args:
        module: Dotted name of the module, as users import it.

    Returns:
        A function that raises ``AttributeError`` for any attribute, so that
        ``hasattr`` and ``from ... import ...`` behave as Python promises.
    """

    def __getattr__(name: str) -> Any:
        raise AttributeError(
            f"{module}.{name} is not simulated: the simulated `rebel` holds only "
            "what vllm-rbln and torch-rbln use on the serving path; run on an NPU "
            "with rebel-compiler for the rest"
        )

    return __getattr__


def not_simulated(what: str, instead: str = "run it on an NPU") -> NotImplementedError:
    """Build the error for a feature that can be named but not simulated.

    Args:
        what: The operator or option as the caller knows it.
        instead: What the caller can do about it.

    Returns:
        The exception, for the caller to raise.
    """
    return NotImplementedError(
        f"{what} is not supported by the simulated NPU; {instead}"
    )
