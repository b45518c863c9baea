# SPDX-License-Identifier: Apache-2.0
"""Which native extension is used, and what it says of layers."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock
import sys
import threading
import time

# Third Party
import pytest
import torch

# First Party
from lmcache import kv_transpose
from lmcache.v1.platform.devices.rbln import native
from lmcache.v1.platform.devices.rbln.kv_plan import Piece
from lmcache.v1.platform.devices.rbln.native import (
    INTERFACE,
    PIECE_COLUMNS,
    TILE_COLUMNS,
)


@pytest.fixture(autouse=True)
def not_looked_for_yet() -> Iterator[None]:
    native.kv_transpose.cache_clear()
    yield
    native.kv_transpose.cache_clear()


def test_both_sides_agree_on_the_columns() -> None:
    assert kv_transpose.INTERFACE == INTERFACE
    assert kv_transpose.TILE_COLUMNS == TILE_COLUMNS
    assert kv_transpose.PIECE_COLUMNS == PIECE_COLUMNS
    assert Piece._fields == PIECE_COLUMNS
    assert native.kv_transpose() is kv_transpose


class Extension(ModuleType):
    """An extension whose columns a test gives, slowly."""

    INTERFACE: Any = INTERFACE
    columns: Any = ()
    PIECE_COLUMNS: Any = PIECE_COLUMNS

    @property
    def TILE_COLUMNS(self) -> Any:  # noqa: N802
        time.sleep(0.01)
        if isinstance(self.columns, Exception):
            raise self.columns
        return self.columns


@pytest.mark.parametrize(
    ("columns", "piece_columns", "says"),
    [
        (TILE_COLUMNS[::-1], PIECE_COLUMNS, "tiles of heads, head"),
        (TILE_COLUMNS, PIECE_COLUMNS[:-1], "another LMCache"),
        (OSError("another build"), PIECE_COLUMNS, "another build"),
    ],
)
def test_an_extension_of_another_build_is_not_used_which_is_said_once(
    monkeypatch: pytest.MonkeyPatch, columns: object, piece_columns: object, says: str
) -> None:
    warning = MagicMock()
    monkeypatch.setattr(native.logger, "warning", warning)
    extension = Extension("lmcache.kv_transpose")
    extension.columns = columns
    extension.PIECE_COLUMNS = piece_columns
    monkeypatch.setitem(sys.modules, "lmcache.kv_transpose", extension)
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        assert native.kv_transpose() is None

    with ThreadPoolExecutor(8) as executor:
        for result in [executor.submit(work) for _ in range(8)]:
            result.result()
    warning.assert_called_once()
    assert says in warning.call_args.args[0] % warning.call_args.args[1:]


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
