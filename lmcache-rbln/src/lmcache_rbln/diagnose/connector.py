# SPDX-License-Identifier: Apache-2.0
"""vLLM's ``--kv-transfer-config``."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
import json

# Local
from lmcache_rbln.diagnose.probe import explain
from lmcache_rbln.diagnose.report import FAIL, OK, SKIP, WARN, Result, one_line
from lmcache_rbln.settings.masking import show

IN_PROCESS = "RBLNLMCacheConnectorV1"
WITH_SERVER = "LMCacheMPConnector"
_FOR_RBLN = (IN_PROCESS, WITH_SERVER)
_MULTI = "MultiConnector"
_FIX = f"""--kv-transfer-config '{{"kv_connector":"{IN_PROCESS}",\
"kv_role":"kv_both"}}'"""


@dataclass(frozen=True)
class Connector:
    """A ``--kv-transfer-config``.

    Attributes:
        name: The class of the connector that is for RBLN; that of the whole if none is.
        outer: The class of the whole.
        config: The whole, as vLLM gets it; None if it was not given or is none.
        extra: The connector's ``kv_connector_extra_config``.
        server: The LMCache server that it uses, or None.
        problem: Why it can't be read, or empty.
    """

    name: str = ""
    outer: str = ""
    config: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    server: str | None = None
    problem: str = ""


def read_connector(text: str | None) -> Connector:
    """Read a ``--kv-transfer-config`` as vLLM gets it.

    Args:
        text: The JSON; None if none was given.
    """
    if text is None:
        return Connector()
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Connector(problem=f"not JSON: {error}")
    if not isinstance(config, dict):
        return Connector(problem=f"a JSON {type(config).__name__}, not an object")
    outer = name = str(config.get("kv_connector") or "")
    extra = config.get("kv_connector_extra_config") or {}
    if outer == _MULTI and isinstance(extra, dict):
        inner = extra.get("connectors")
        for one in inner if isinstance(inner, list) else ():
            if isinstance(one, dict) and one.get("kv_connector") in _FOR_RBLN:
                name = one["kv_connector"]
                extra = one.get("kv_connector_extra_config") or {}
                break
    if not isinstance(extra, dict):
        return Connector(problem="kv_connector_extra_config is not an object")
    server = None
    if name == WITH_SERVER:
        # LMCacheMPConnector's own defaults. What is no address can't be reached.
        host = extra.get("lmcache.mp.host", "tcp://localhost")
        server = f"{host}:{extra.get('lmcache.mp.port', 5555)}"
        if urls := extra.get("lmcache.mp.server_urls"):
            server = str(urls[0] if isinstance(urls, list) else urls).split(",")[0]
    return Connector(name, outer, config, extra, server)


def ask_vllm(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Have vLLM read its ``--kv-transfer-config``, and load it; runs in a probe.

    Returns:
        Why it is ``refused``, or the connector ``unloadable``; else nothing.
    """
    # Third Party
    from vllm.config import KVTransferConfig
    import pydantic

    if config is None:
        return {}
    try:
        KVTransferConfig(**config)
    except pydantic.ValidationError as error:
        # As a text it would quote the value.
        said = error.errors(include_input=False, include_url=False)
        places = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in said)
        return {"refused": "; ".join(places)}
    except Exception as error:
        return {"refused": explain(error)}
    name, module = config.get("kv_connector"), config.get("kv_connector_module_path")
    if name == IN_PROCESS and not module:
        module = "lmcache_rbln.integration.vllm.connector"
    try:
        if module:
            getattr(import_module(module), str(name))
    except Exception as error:
        return {"unloadable": explain(error)}
    return {}


def check_connector(connector: Connector, vllm: Mapping[str, Any] | None) -> Result:
    """Check that vLLM can load the connector, and that it is one that works on RBLN.

    Args:
        connector: The configuration.
        vllm: The topic ``vllm`` of the runtime probe; None if vLLM was not asked.
    """
    wanted = f"{IN_PROCESS}, or {WITH_SERVER} with an lmcache server"
    asked, vllm = vllm is not None, vllm or {}
    if connector.problem:
        return Result(FAIL, one_line(connector.problem), "a JSON object", _FIX)
    if vllm.get("error"):
        found = one_line(f"import vllm: {vllm['error']}")
        return Result(FAIL, found, "vLLM that can be imported", "install vLLM again")
    if connector.config is None:
        return Result(SKIP, "not given; --kv-transfer-config checks one")
    if vllm.get("refused"):
        return Result(FAIL, one_line(vllm["refused"]), "what vLLM accepts", _FIX)
    if connector.name not in _FOR_RBLN:
        shown = show(connector.name, kind="name") if connector.name else ""
        return Result(FAIL, shown or "no kv_connector", wanted, _FIX)
    if vllm.get("unloadable"):
        found = one_line(f"{connector.name}: {vllm['unloadable']}")
        fix = "correct kv_connector_module_path, or leave it out"
        return Result(FAIL, found, "a class that can be imported", fix)
    if not asked:
        found = f"{connector.name}; vLLM not asked: torch can't be imported"
        return Result(SKIP, found)
    policy = connector.config.get("kv_load_failure_policy") or "fail"
    if connector.outer == _MULTI and policy != "recompute":
        return Result(
            WARN,
            f"{_MULTI} with kv_load_failure_policy {policy}: a request whose KV can't "
            "be loaded fails",
            "recompute, which a connector inside can't set",
            'set "kv_load_failure_policy":"recompute" beside "kv_connector"',
        )
    where = f", server {show(connector.server)}" if connector.server else ""
    inside = f" in {_MULTI}" if connector.outer == _MULTI else ""
    # vLLM accepted the role.
    return Result(
        OK, f"{connector.name}{inside} ({connector.config['kv_role']}){where}"
    )
