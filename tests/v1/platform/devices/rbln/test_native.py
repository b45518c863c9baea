# SPDX-License-Identifier: Apache-2.0
"""Which native extension is used."""

# Standard
from collections.abc import Iterator
from types import ModuleType
from typing import Any
import sys

# Third Party
from kv_reference import Case, check_both_directions
import pytest

# First Party
from lmcache import kv_transpose
from lmcache.v1.platform.devices.rbln import native
from lmcache.v1.platform.devices.rbln.native import INTERFACE


@pytest.fixture(autouse=True)
def not_looked_for_yet() -> Iterator[None]:
    native.kv_transpose.cache_clear()
    yield
    native.kv_transpose.cache_clear()


def test_both_sides_agree_on_the_interface() -> None:
    assert kv_transpose.INTERFACE == INTERFACE
    assert native.kv_transpose() is kv_transpose


class Extension(ModuleType):
    """An extension whose interface a test gives."""

    interface: Any = INTERFACE

    @property
    def INTERFACE(self) -> Any:  # noqa: N802
        if isinstance(self.interface, Exception):
            raise self.interface
        return self.interface


@pytest.mark.parametrize(
    ("interface", "says"),
    [
        (INTERFACE - 1, f"of another LMCache, with interface {INTERFACE - 1}"),
        (OSError("an undefined symbol"), "an undefined symbol"),
        (None, "can't be imported"),
    ],
)
def test_without_the_extension_of_this_build_the_first_transfer_says_why(
    monkeypatch: pytest.MonkeyPatch, interface: object, says: str
) -> None:
    extension = None
    if interface is not None:
        extension = Extension("lmcache.kv_transpose")
        extension.interface = interface
    # None is what importing a module that is not there looks like.
    monkeypatch.setitem(sys.modules, "lmcache.kv_transpose", extension)
    with pytest.raises(ImportError, match=says) as missing:
        check_both_directions(Case("mla"), "cpu", [1, 0], 2)
    assert "pip install" in str(missing.value)
