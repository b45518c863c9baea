# SPDX-License-Identifier: Apache-2.0
"""Matrix products whose result does not depend on the shape they run in.

A host BLAS sums in an order that depends on the number of rows, so the same token
could get other low bits alone than in a batch, and greedy outputs would differ
between a cold run and one that restores its KV cache. Products are therefore
accumulated in float64 and rounded once: what is left of the order is 2**-53, far
below half a unit in the last place of any dtype that is served.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

_NARROW = frozenset({torch.float16, torch.bfloat16, torch.float32})


def _widen(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) else value


def in_float64(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a matrix product so that it accumulates in float64.

    Args:
        function: Takes tensors (and scalars) and returns one new tensor.

    Returns:
        A function with the same signature and result dtype. Operands of mixed or
        of other dtypes go to ``function`` as they are, errors included.
    """

    @functools.wraps(function, assigned=("__name__", "__doc__"), updated=())
    def exact(*args: Any, **kwargs: Any) -> torch.Tensor:
        operands = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        dtypes = {a.dtype for a in operands}
        if len(dtypes) != 1 or not dtypes <= _NARROW or "out" in kwargs:
            return function(*args, **kwargs)
        wide = {key: _widen(value) for key, value in kwargs.items()}
        return function(*map(_widen, args), **wide).to(dtypes.pop())

    return exact


_PRODUCTS: tuple[Callable[..., torch.Tensor], ...] = (
    torch.nn.functional.linear,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
    operator.matmul,
    torch.ops.aten.linear.default,
    torch.ops.aten.matmul.default,
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
)

EXACT_FUNCTIONS: dict[Any, Callable[..., torch.Tensor]] = {
    product: in_float64(product) for product in _PRODUCTS
}
EXACT_METHODS: dict[str, Callable[..., torch.Tensor]] = {
    name: EXACT_FUNCTIONS[getattr(torch, name)]
    for name in ("matmul", "mm", "bmm", "addmm", "baddbmm")
}
