# SPDX-License-Identifier: Apache-2.0
"""Probe of LMCache: its native extensions, its settings, and its server.

Usage: ``python -m lmcache_rbln.diagnose.probe_lmcache``, with a JSON object on standard
input: ``connector`` (its name), ``extra`` (``kv_connector_extra_config``), ``vllm``
(what is known of it), ``server`` and ``http`` (URLs or null), ``timeout`` in seconds,
and ``environment``, which holds for the settings and not for this process.
"""

# Future
from __future__ import annotations

# Standard
from contextlib import suppress
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any
import importlib.util
import json
import os
import sys

# Local
from lmcache_rbln.diagnose.probe import explain, guard, tell


def _tell_build() -> None:
    """Import every native extension of LMCache."""
    try:
        # Third Party
        import torch
    except Exception as error:
        tell("build", error=f"import torch: {explain(error)}")
        return
    spec = importlib.util.find_spec("lmcache")
    if spec is None or not spec.origin:
        tell("build", error="LMCache can't be imported: there is no package lmcache")
        return
    built_for = None
    with suppress(Exception):
        built_for = import_module(
            "lmcache.v1.platform.devices.rbln.built_with"
        ).TORCH_VERSION
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
            broken[extension] = explain(error)
    tell(
        "build",
        torch=str(torch.__version__),
        built_for=built_for,
        loaded=loaded,
        broken=broken,
    )


def _tell_settings(request: dict[str, Any]) -> None:
    """Check the settings as the engine does at start-up."""
    # Local
    from lmcache_rbln.diagnose.settings import examine
    from lmcache_rbln.settings import VllmFacts

    environment = dict(os.environ) | request["environment"]
    vllm = VllmFacts(**request["vllm"])
    tell(
        "settings",
        **examine(environment, request["connector"], request["extra"], vllm),
    )


def _tell_server(request: dict[str, Any]) -> None:
    # Local
    from lmcache_rbln.diagnose import server

    url, timeout_s = request["server"], request["timeout"]
    http = {}
    if request["http"]:
        http = server.ask_http(request["http"], timeout_s)
        tell("http", **http)
    if url:
        problem = server.connection_problem(url, timeout_s)
        if problem:
            tell("server", error=problem)
        else:
            tell("server", **server.ask(url, not http.get("mode"), timeout_s))


def main() -> None:
    """Tell all that was asked for, then end at once, whatever threads still run."""
    request = json.load(sys.stdin)
    guard("build", _tell_build)
    guard("settings", _tell_settings, request)
    guard("server", _tell_server, request)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
