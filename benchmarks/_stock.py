# SPDX-License-Identifier: Apache-2.0
"""LMCache's own RBLN operations, from the pinned sdist and under another name."""

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


def sdist() -> Path:
    """Return the pinned sdist.

    Raises:
        RuntimeError: It is not in ``build/``, or not the pinned one.
    """
    pinned = tomllib.loads((ROOT / "upstream.toml").read_text("utf-8"))["upstream"]
    name = f"{pinned['name']}-{pinned['version']}.tar.gz"
    path = ROOT / "build" / "cache" / "sdist" / name
    found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    if found != pinned["sha256"]:
        raise RuntimeError(
            f"the stock operations come from {path}: its sha256 must be "
            f"{pinned['sha256']}, got {found or 'no such file'}; remove it and run "
            "`make setup`"
        )
    return path


def load_ops() -> Any:
    """Return an instance of the stock ``RblnDeviceOps``.

    Raises:
        RuntimeError: See :func:`sdist`.
    """
    if NAME not in sys.modules:
        archive = sdist()
        inside = f"{archive.name.removesuffix('.tar.gz')}/{_PACKAGE.replace('.', '/')}"
        with tempfile.TemporaryDirectory(prefix="lmcache-stock-") as folder:
            package = Path(folder, NAME)
            package.mkdir()
            (package / "__init__.py").touch()
            with tarfile.open(archive) as tar:
                for module in ("kv_layout", "kv_ops", "device_ops"):
                    file = tar.extractfile(f"{inside}/{module}.py")
                    assert file is not None
                    # They import each other by their full names.
                    source = file.read().decode().replace(_PACKAGE, NAME)
                    (package / f"{module}.py").write_text(source)
            sys.path.insert(0, folder)
            try:
                importlib.import_module(f"{NAME}.device_ops")
            finally:
                sys.path.remove(folder)
    return sys.modules[f"{NAME}.device_ops"].RblnDeviceOps()
