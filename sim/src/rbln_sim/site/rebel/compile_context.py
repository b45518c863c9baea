# SPDX-License-Identifier: Apache-2.0
"""``CompileContext``: shared state between graphs of one model."""

from typing import Any

import torch

from ._unsupported import missing_attribute

__all__ = ["CompileContext"]


class CompileContext:
    """State that several compiled graphs share.

    Graphs of the simulator always share weights and addresses, because they run
    over the tensors themselves, so a context only remembers what it was told.

    Args:
        use_weight_sharing: Accepted; always the case here.
        use_global_ctx: Accepted; there is one context per process.
    """

    def __init__(
        self, use_weight_sharing: bool = False, use_global_ctx: bool = False
    ) -> None:
        self.use_weight_sharing = use_weight_sharing
        self.use_global_ctx = use_global_ctx
        self.static_addresses: dict[str, torch.Tensor] = {}

    def mark_static_address(self, tensor: torch.Tensor, name: str) -> None:
        """Declare that ``tensor`` stays at its address between runs.

        Args:
            tensor: Usually one layer's KV cache.
            name: Unique name; a later call with the same name replaces it.
        """
        self.static_addresses[name] = tensor

    def __enter__(self) -> "CompileContext":
        return self

    def __exit__(self, *exc_info: Any) -> None:
        return None


__getattr__ = missing_attribute("rebel.compile_context")
