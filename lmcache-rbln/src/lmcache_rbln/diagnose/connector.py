# SPDX-License-Identifier: Apache-2.0
"""vLLM's ``--kv-transfer-config``, and whether chunks hold whole blocks."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
import json

# Local
from lmcache_rbln.diagnose.result import Result, fail, ok, one_line, skip, warn

IN_PROCESS = "RBLNLMCacheConnectorV1"
WITH_SERVER = "LMCacheMPConnector"
_ROLES = ("kv_both", "kv_producer", "kv_consumer")
_SERVER_PREFIX = "lmcache.mp."
# LMCacheMPConnector's own defaults.
_DEFAULT_HOST = "tcp://localhost"
_DEFAULT_PORT = 5555


@dataclass(frozen=True)
class Connector:
    """A ``--kv-transfer-config``.

    Attributes:
        name: The connector's class; empty if none was given.
        role: Its role.
        extra: Its ``kv_connector_extra_config``.
        server: The LMCache server that it uses, or None.
        problem: Why it can't be read, or empty.
    """

    name: str = ""
    role: str = ""
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
    except ValueError as error:
        return Connector(problem=f"not JSON: {error}")
    if not isinstance(config, dict):
        return Connector(problem=f"a JSON {type(config).__name__}, not an object")
    extra = config.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        return Connector(problem="kv_connector_extra_config is not an object")
    name = str(config.get("kv_connector") or "")
    server = _server_of(extra) if name == WITH_SERVER else None
    return Connector(name, str(config.get("kv_role") or ""), extra, server)


def _server_of(extra: Mapping[str, Any]) -> str:
    urls = extra.get(f"{_SERVER_PREFIX}server_urls")
    if isinstance(urls, str):
        urls = [url.strip() for url in urls.split(",") if url.strip()]
    if urls:
        return str(urls[0])
    host = extra.get(f"{_SERVER_PREFIX}host", _DEFAULT_HOST)
    return f"{host}:{extra.get(f'{_SERVER_PREFIX}port', _DEFAULT_PORT)}"


def check_connector(connector: Connector) -> Result:
    """Check that the connector is one that works on RBLN."""
    name = "connector"
    fix = f"""--kv-transfer-config '{{"kv_connector":"{IN_PROCESS}",\
"kv_role":"kv_both"}}'"""
    wanted = f"{IN_PROCESS}, or {WITH_SERVER} with an lmcache server"
    if connector.problem:
        return fail(name, one_line(connector.problem), "a JSON object", fix)
    if not connector.name and not connector.role:
        return skip(name, "not given; --kv-transfer-config checks one")
    if connector.role not in _ROLES:
        found = f"kv_role={connector.role!r}"
        return fail(name, found, " or ".join(_ROLES), fix)
    if connector.name == "MultiConnector":
        return warn(
            name, "MultiConnector: its connectors were not looked at", wanted, fix
        )
    if connector.name not in (IN_PROCESS, WITH_SERVER):
        return fail(name, connector.name or "no kv_connector", wanted, fix)
    where = f", server {connector.server}" if connector.server else ""
    return ok(name, f"{connector.name} ({connector.role}){where}")


def check_chunk(chunk: int | None, source: str, block: int | None) -> Result:
    """Check that a chunk is a whole number of blocks.

    Args:
        chunk: LMCache's chunk size in tokens; None if it is not known.
        source: Where the chunk size is set.
        block: vLLM's block size in tokens; None if it is not known.
    """
    name = "chunk and block"
    if not isinstance(chunk, int):
        return skip(name, "the chunk size is not known")
    if chunk < 1:
        fix = "set LMCACHE_CHUNK_SIZE to the block size"
        return fail(name, f"chunk of {chunk} tokens ({source})", "1 or more", fix)
    if block is None:
        return skip(name, f"chunk of {chunk} tokens ({source}); give --block-size")
    if block < 1:
        return fail(name, f"block of {block} tokens", "1 or more", "give --block-size")
    if chunk % block:
        near = -(-chunk // block) * block
        set_chunk = (
            f"start the server with --chunk-size {near}"
            if source == "server"
            else f"export LMCACHE_CHUNK_SIZE={near}"
        )
        return fail(
            name,
            f"chunk of {chunk} tokens ({source}), block of {block}",
            "a chunk that is a multiple of the block",
            f"{set_chunk}, or start vLLM with another --block-size",
        )
    return ok(name, f"chunk of {chunk} tokens ({source}), block of {block}")
