# SPDX-License-Identifier: Apache-2.0
"""Chunks in messages: pickles that may hold tensors, and nothing else.

A pickle names functions that are called when it is read. What comes by the network may
name only those that make a tensor.
"""

# Future
from __future__ import annotations

# Standard
from collections import OrderedDict
from typing import Any
import io
import pickle

# Third Party
import torch


def load_tensors(data: bytes) -> list[torch.Tensor]:
    """Read tensors that ``pickle.dumps`` has written.

    Args:
        data: The pickle of a list of CPU tensors.

    Returns:
        The tensors.

    Raises:
        pickle.UnpicklingError: There is something else in it.
    """
    found = _TensorUnpickler(io.BytesIO(data)).load()
    if not isinstance(found, list) or not all(map(torch.is_tensor, found)):
        raise pickle.UnpicklingError(
            f"wanted a list of tensors in a message, got {type(found).__name__}"
        )
    return found


def _load_storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


class _TensorUnpickler(pickle.Unpickler):
    _makes_tensors = {
        ("collections", "OrderedDict"): OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
        # torch's own takes any pickle.
        ("torch.storage", "_load_from_bytes"): _load_storage,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle may name.

        Raises:
            pickle.UnpicklingError: It makes no tensor.
        """
        if (module, name) not in self._makes_tensors:
            raise pickle.UnpicklingError(
                f"wanted tensors only in a message, got {module}.{name}: something "
                "that is no LMCache worker or server has sent it"
            )
        return self._makes_tensors[module, name]
