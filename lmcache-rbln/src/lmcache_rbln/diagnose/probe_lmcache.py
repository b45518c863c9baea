# SPDX-License-Identifier: Apache-2.0
"""Probe of LMCache: its native extensions, its settings, and its server.

Usage: ``python -m lmcache_rbln.diagnose.probe_lmcache REQUEST``, a JSON object with
``connector_config`` (``kv_connector_extra_config``), ``server`` (a URL or null),
``modes`` (whether to try the server's transfer modes) and ``timeout`` in seconds.
"""

# Future
from __future__ import annotations

# Standard
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any
import importlib.util
import json
import os
import sys

# Local
from lmcache_rbln.diagnose.probe import tell
from lmcache_rbln.diagnose.result import one_line


def _explain(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}")


def _tell_build() -> None:
    """Import every native extension of LMCache."""
    try:
        # Third Party
        import torch
    except Exception as error:
        tell("build", error=f"import torch: {_explain(error)}")
        return
    spec = importlib.util.find_spec("lmcache")
    if spec is None or not spec.origin:
        tell("build", error="LMCache can't be imported: there is no package lmcache")
        return
    built_for = None
    problem = ""
    try:
        built_for = import_module(
            "lmcache.v1.platform.devices.rbln.built_with"
        ).TORCH_VERSION
    except Exception as error:
        problem = _explain(error)
    loaded, broken = [], {}
    for path in sorted(Path(spec.origin).parent.iterdir()):
        suffix = next((s for s in EXTENSION_SUFFIXES if path.name.endswith(s)), None)
        if suffix is None:
            continue
        extension = path.name[: -len(suffix)]
        try:
            import_module(f"lmcache.{extension}")
            loaded.append(extension)
        except Exception as error:
            broken[extension] = _explain(error)
    tell(
        "build",
        torch=str(torch.__version__),
        built_for=built_for,
        problem=problem,
        loaded=loaded,
        broken=broken,
    )


def _tell_settings(connector_config: dict[str, Any]) -> None:
    """Parse the settings as LMCache does at start-up."""
    # Local
    from lmcache_rbln.diagnose.lmcache_settings import parse

    try:
        tell("settings", **parse(os.environ, connector_config))
    except Exception as error:
        tell("settings", error=_explain(error))


def _tell_server(url: str, modes: bool, timeout_s: float) -> None:
    # Local
    from lmcache_rbln.diagnose.server import ask

    try:
        tell("server", **ask(url, modes, timeout_s))
    except Exception as error:
        tell("server", error=_explain(error))


def main() -> None:
    """Tell all that was asked for, then end at once, whatever threads still run."""
    request = json.loads(sys.argv[1])
    _tell_build()
    _tell_settings(request["connector_config"])
    if request["server"]:
        _tell_server(request["server"], request["modes"], request["timeout"])
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
