# SPDX-License-Identifier: Apache-2.0
"""Fixtures over ``tests/support/rds_support.py``.

Nothing here may import torch at the top: the conftest at the root has not chosen the
runtime yet when this file is read.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Third Party
import pytest

if TYPE_CHECKING:
    # Third Party
    from rds_support import Engine, Storage


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    """A storage of the test's own."""
    # Third Party
    from rds_support import own_storage

    with own_storage(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def engine(storage: Storage) -> Iterator[Callable[..., Engine]]:
    """Makes engines on the test's storage."""
    # Third Party
    from rds_support import engines

    with engines() as make:
        yield make
