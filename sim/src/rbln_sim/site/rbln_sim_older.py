# SPDX-License-Identifier: Apache-2.0
"""``RBLN_SIM_WITHOUT``: torch-rbln as an older release was, with features taken away.

Installed by :mod:`sitecustomize` in child processes, by ``rbln_sim.activate()`` in its
own. Nothing is imported here that the program would not import itself.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from functools import wraps
from types import ModuleType
from typing import Any
from collections.abc import Callable

VARIABLE = "RBLN_SIM_WITHOUT"
# torch knows this module as torch.rbln.
_MODULE = "torch_rbln.device"
# Functions of torch and methods of tensors that take pin_memory=True. They are the ways
# there from Python but torch.ops; an older release refuses C++ callers as well.
_MAKERS = (
    "arange", "bartlett_window", "blackman_window", "empty", "empty_like",
    "empty_permuted", "empty_quantized", "empty_strided", "eye", "from_file", "full",
    "full_like", "hamming_window", "hann_window", "kaiser_window", "linspace",
    "logspace", "normal", "ones", "ones_like", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "randperm", "range", "scalar_tensor",
    "sparse_bsc_tensor", "sparse_bsr_tensor", "sparse_compressed_tensor",
    "sparse_coo_tensor", "sparse_csc_tensor", "sparse_csr_tensor", "tensor",
    "tril_indices", "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor",
            "new_zeros")  # fmt: skip


def features() -> frozenset[str]:
    """Return what ``RBLN_SIM_WITHOUT`` takes away.

    Raises:
        ValueError: It names something unknown.
    """
    names = frozenset(filter(None, os.environ.get(VARIABLE, "").split(",")))
    if unknown := names - {"streams", "pinned"}:
        raise ValueError(
            f"{VARIABLE}: {', '.join(sorted(unknown))} is neither 'streams' nor "
            "'pinned'"
        )
    return names


def _without_streams(module: ModuleType) -> None:
    streams = sys.modules[f"{_MODULE}.streams"]
    for name in (*streams.__all__, "streams"):
        if hasattr(module, name):
            delattr(module, name)


def _refuse_pinned() -> None:
    # What torch says when the accelerator has no allocator for pinned memory.
    raise RuntimeError("Need to provide pin_memory allocator to use pin memory.")


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def checked(*arguments: Any, **options: Any) -> Any:
        if options.get("pin_memory"):
            _refuse_pinned()
        return make(*arguments, **options)

    return checked


def _without_pinned() -> None:
    torch = sys.modules["torch"]
    for name in _MAKERS:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    for name in _METHODS:
        setattr(torch.Tensor, name, _unpinned(getattr(torch.Tensor, name)))
    for owner in (torch.Tensor, torch.UntypedStorage, torch.TypedStorage):
        owner.pin_memory = lambda *_, **__: _refuse_pinned()


def _take_away(module: ModuleType) -> None:
    if "streams" in features():
        _without_streams(module)
    if "pinned" in features():
        _without_pinned()


class _Loader(importlib.abc.Loader):
    """Loads the module as its own loader does, then takes features away."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _take_away(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def install() -> None:
    """Take the features away as soon as torch-rbln is imported.

    Raises:
        ValueError: ``RBLN_SIM_WITHOUT`` names something unknown.
    """
    if features() and not any(type(f).__name__ == "_Finder" for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
