# SPDX-License-Identifier: Apache-2.0
"""LMCache's own RBLN operations, from the pinned sdist and under another name."""

# Future
from __future__ import annotations

# Standard
from pathlib import Path
from typing import Any
import hashlib
import importlib
import sys
import tarfile
import tempfile
import tomllib

ROOT = Path(__file__).resolve().parents[1]
NAME = "lmcache_stock_rbln"
_PACKAGE = "lmcache.v1.platform.devices.rbln"
_MODULES = ("kv_layout", "kv_ops", "device_ops")


def sdist() -> Path:
    """Return the pinned sdist.

    Raises:
        RuntimeError: It is not in ``build/``, or not the pinned one.
    """
    pinned = tomllib.loads((ROOT / "upstream.toml").read_text("utf-8"))["upstream"]
    name = f"{pinned['name']}-{pinned['version']}.tar.gz"
    path = ROOT / "build" / "cache" / "sdist" / name
    if not path.is_file():
        raise RuntimeError(
            f"the stock operations come from {path}, which does not exist; "
            "`make setup` downloads it"
        )
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != pinned["sha256"]:
        raise RuntimeError(
            f"{path} has sha256 {found}, upstream.toml wants {pinned['sha256']}; "
            "remove it and run `make setup`"
        )
    return path


def unpack(archive: Path, folder: Path) -> None:
    """Write the stock modules as package ``lmcache_stock_rbln`` below a folder.

    Args:
        archive: The sdist.
        folder: Where the package goes.

    Raises:
        RuntimeError: The sdist lacks one of them.
    """
    package = folder / NAME
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    inside = f"{archive.name.removesuffix('.tar.gz')}/{_PACKAGE.replace('.', '/')}"
    with tarfile.open(archive) as tar:
        for module in _MODULES:
            try:
                file = tar.extractfile(f"{inside}/{module}.py")
            except KeyError:
                file = None
            if file is None:
                raise RuntimeError(f"{archive} has no {inside}/{module}.py")
            # They import each other by their full names.
            source = file.read().decode().replace(_PACKAGE, NAME)
            (package / f"{module}.py").write_text(source)


def load_ops() -> Any:
    """Return an instance of the stock ``RblnDeviceOps``.

    Raises:
        RuntimeError: See :func:`sdist`.
    """
    if NAME not in sys.modules:
        with tempfile.TemporaryDirectory(prefix="lmcache-stock-") as folder:
            unpack(sdist(), Path(folder))
            sys.path.insert(0, folder)
            try:
                importlib.import_module(f"{NAME}.device_ops")
            finally:
                sys.path.remove(folder)
    return sys.modules[f"{NAME}.device_ops"].RblnDeviceOps()
