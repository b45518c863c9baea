# SPDX-License-Identifier: Apache-2.0
"""Which native extension is used, and what it says of layers."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterator
from types import ModuleType
from typing import Any
import sys

# Third Party
from kv_reference import Case, check_both_directions
import pytest
import torch

# First Party
from lmcache import kv_transpose
from lmcache.v1.platform.devices.rbln import native
from lmcache.v1.platform.devices.rbln.kv_plan import Piece
from lmcache.v1.platform.devices.rbln.native import INTERFACE, PIECE_COLUMNS


@pytest.fixture(autouse=True)
def not_looked_for_yet() -> Iterator[None]:
    native.kv_transpose.cache_clear()
    yield
    native.kv_transpose.cache_clear()


def test_both_sides_agree_on_the_columns() -> None:
    assert kv_transpose.INTERFACE == INTERFACE
    assert kv_transpose.PIECE_COLUMNS == PIECE_COLUMNS
    assert Piece._fields == PIECE_COLUMNS
    assert native.kv_transpose() is kv_transpose


class Extension(ModuleType):
    """An extension whose columns a test gives."""

    INTERFACE: Any = INTERFACE
    columns: Any = ()

    @property
    def PIECE_COLUMNS(self) -> Any:  # noqa: N802
        if isinstance(self.columns, Exception):
            raise self.columns
        return self.columns


@pytest.mark.parametrize(
    ("interface", "columns", "says"),
    [
        (INTERFACE, PIECE_COLUMNS[:-1], "of another LMCache"),
        (INTERFACE - 1, PIECE_COLUMNS, f"interface {INTERFACE - 1} in place of"),
        (INTERFACE, OSError("an undefined symbol"), "an undefined symbol"),
        (None, None, "can't be imported"),
    ],
)
def test_without_the_extension_of_this_build_the_first_transfer_says_why(
    monkeypatch: pytest.MonkeyPatch, interface: object, columns: object, says: str
) -> None:
    extension = None
    if interface is not None:
        extension = Extension("lmcache.kv_transpose")
        extension.INTERFACE = interface
        extension.columns = columns
    # None is what importing a module that is not there looks like.
    monkeypatch.setitem(sys.modules, "lmcache.kv_transpose", extension)
    with pytest.raises(ImportError, match=says) as missing:
        check_both_directions(Case("mla"), "cpu", [1, 0], 2)
    assert "pip install" in str(missing.value)


@pytest.mark.parametrize(
    "odd",
    [
        torch.zeros(3, 2),
        torch.zeros(3, 2).mT,  # only its strides
        torch.zeros(2, 3, 1),
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(2, 3, device="meta"),
    ],
)
def test_the_first_tensor_unlike_the_others_is_found(odd: torch.Tensor) -> None:
    like = [torch.zeros(2, 3) for _ in range(4)]
    assert kv_transpose.first_unlike([*like[:2], odd, odd]) == 2
    assert kv_transpose.first_unlike(like) is None
    assert kv_transpose.first_unlike([odd]) is None
    assert kv_transpose.first_unlike([]) is None
