# SPDX-License-Identifier: Apache-2.0
"""vLLM's ``--kv-transfer-config``."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
import json

# Local
from lmcache_rbln.diagnose.result import Result, fail, ok, one_line, skip, warn
from lmcache_rbln.settings.masking import show

IN_PROCESS = "RBLNLMCacheConnectorV1"
WITH_SERVER = "LMCacheMPConnector"
_MULTI = "MultiConnector"
_SERVER_PREFIX = "lmcache.mp."
# LMCacheMPConnector's own defaults.
_DEFAULT_HOST = "tcp://localhost"
_DEFAULT_PORT = 5555


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
    except json.JSONDecodeError as error:
        return Connector(problem=f"not JSON: {error}")
    except (ValueError, RecursionError) as error:
        return Connector(problem=f"not JSON that can be read ({type(error).__name__})")
    if not isinstance(config, dict):
        return Connector(problem=f"a JSON {type(config).__name__}, not an object")
    extra = config.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        return Connector(problem="kv_connector_extra_config is not an object")
    outer = name = str(config.get("kv_connector") or "")
    if outer == _MULTI:
        for inner in _inner(extra):
            inner_extra = inner.get("kv_connector_extra_config") or {}
            if inner.get("kv_connector") in (IN_PROCESS, WITH_SERVER) and isinstance(
                inner_extra, dict
            ):
                name, extra = str(inner["kv_connector"]), inner_extra
                break
    server = _server_of(extra) if name == WITH_SERVER else None
    return Connector(name, outer, config, extra, server)


def _inner(extra: Mapping[str, Any]) -> list[dict[str, Any]]:
    connectors = extra.get("connectors")
    if not isinstance(connectors, list):
        return []
    return [inner for inner in connectors if isinstance(inner, dict)]


def _server_of(extra: Mapping[str, Any]) -> str | None:
    urls = extra.get(f"{_SERVER_PREFIX}server_urls")
    if urls:
        texts = urls.split(",") if isinstance(urls, str) else urls
        # Other than texts are reported with the settings.
        if isinstance(texts, list):
            return next(
                (t.strip() for t in texts if isinstance(t, str) and t.strip()), None
            )
        return None
    host = extra.get(f"{_SERVER_PREFIX}host", _DEFAULT_HOST)
    return f"{host}:{extra.get(f'{_SERVER_PREFIX}port', _DEFAULT_PORT)}"


def check_connector(connector: Connector, vllm: Mapping[str, Any] | None) -> Result:
    """Check that vLLM can load the connector, and that it is one that works on RBLN.

    Args:
        connector: The configuration.
        vllm: The topic ``vllm`` of the runtime probe; None if vLLM was not asked.
    """
    name = "connector"
    fix = f"""--kv-transfer-config '{{"kv_connector":"{IN_PROCESS}",\
"kv_role":"kv_both"}}'"""
    wanted = f"{IN_PROCESS}, or {WITH_SERVER} with an lmcache server"
    if connector.problem:
        return fail(name, one_line(connector.problem), "a JSON object", fix)
    asked, vllm = vllm is not None, vllm or {}
    if vllm.get("error"):
        found = one_line(f"import vllm: {vllm['error']}")
        return fail(name, found, "vLLM that can be imported", "install vLLM again")
    if connector.config is None:
        return skip(name, "not given; --kv-transfer-config checks one")
    if vllm.get("refused"):
        return fail(name, one_line(vllm["refused"]), "what vLLM accepts", fix)
    if connector.name not in (IN_PROCESS, WITH_SERVER):
        shown = show(connector.name, kind="name") if connector.name else ""
        return fail(name, shown or "no kv_connector", wanted, fix)
    if vllm.get("unloadable"):
        found = one_line(f"{connector.name}: {vllm['unloadable']}")
        wanted = "a class that can be imported"
        return fail(
            name, found, wanted, "correct kv_connector_module_path, or leave it out"
        )
    if not asked:
        return skip(name, f"{connector.name}; vLLM not asked: torch can't be imported")
    role = connector.config["kv_role"]  # vLLM accepted it
    policy = connector.config.get("kv_load_failure_policy")
    if connector.outer == _MULTI and policy != "recompute":
        return warn(
            name,
            f"{_MULTI} with kv_load_failure_policy {policy or 'fail'}: a request whose "
            "KV can't be loaded fails",
            "recompute, which a connector inside can't set",
            'set "kv_load_failure_policy":"recompute" beside "kv_connector"',
        )
    where = f", server {show(connector.server)}" if connector.server else ""
    inside = f" in {_MULTI}" if connector.outer == _MULTI else ""
    return ok(name, f"{connector.name}{inside} ({role}){where}")
