# SPDX-License-Identifier: Apache-2.0
"""The LMCache server: is it there, and does it serve RBLN workers?"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping
from typing import Any
import json
import os
import socket
import time
import urllib.error
import urllib.request

# Local
from lmcache_rbln.diagnose.result import Result, fail, ok, one_line, skip
from lmcache_rbln.settings.masking import show

_NAME = "server"
_START = "start it: lmcache server --supported-transfer-mode engine_driven ..."
_TRANSPORTS = {"tcp": "ZMQ", "grpc": "gRPC"}
_GREETING_S = 1.0
_HTTP2_SETTINGS = 4
_MOST_HTTP = 1 << 20
_MODE_OF = {
    "engine_driven": "unregister_kv_cache_engine_driven_context",
    "lmcache_driven": "unregister_kv_cache",
}


def server_url(text: str) -> str:
    """Return a server's URL as LMCache's client wants it: ``host:port`` gets tcp."""
    return text if "://" in text else f"tcp://{text}"


def connection_problem(url: str, timeout_s: float) -> str:
    """Tell why a server can't be asked over a transport, or return an empty text.

    ZMQ itself tries for ever and says nothing.
    """
    scheme, _, address = url.partition("://")
    if scheme not in _TRANSPORTS:
        return ""
    shown = show(url)
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as made:
            speaks = _transport(made)
    except ValueError:
        return f"{shown}: no port"
    except OverflowError as error:
        return f"{shown}: {error}"
    except OSError as error:
        return f"{shown}: {error.strerror or error}"
    if speaks in ("", _TRANSPORTS[scheme]):
        return ""
    right = next((s for s, name in _TRANSPORTS.items() if name == speaks), None)
    use = f"; use {right}://" if right else ", not the server's request channel"
    return f"{shown}: the server speaks {speaks} there{use}"


def _transport(connection: socket.socket) -> str:
    """Return what the other side speaks; empty if it does not show."""
    connection.settimeout(_GREETING_S)
    # A ZMQ server greets at once. A gRPC server answers the beginning of HTTP/2, and
    # so does one for HTTP, with an error.
    for opening in (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4" + b"\0" * 5):
        try:
            connection.sendall(opening)
            greeting = connection.recv(10)
        except OSError:
            continue
        if greeting[:1] == b"\xff":
            return "ZMQ"
        if greeting.startswith(b"HTTP/"):
            return "HTTP"
        if len(greeting) > 3 and greeting[3] == _HTTP2_SETTINGS:
            return "gRPC"
        if greeting:
            return ""
    return ""


def ask(url: str, modes: bool, timeout_s: float) -> dict[str, Any]:
    """Ask a server over its request channel. Runs in the LMCache probe.

    A mode is tried with a call that ends the registration of a worker that does not
    exist: the server answers it if it has the mode, and does nothing but log it.

    Args:
        url: The server, for example ``tcp://localhost:6555``.
        modes: Whether to try the transfer modes.
        timeout_s: How long to wait for all answers.

    Returns:
        ``chunk_size``, and ``modes`` with a truth value for each mode if asked for; or
        ``error``.
    """
    # First Party
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    deadline = time.monotonic() + timeout_s

    def rest() -> float:
        return max(0.1, deadline - time.monotonic())

    def answered(call: Any, patience_s: float) -> bool:
        try:
            call.result(timeout=patience_s)
        except Exception:
            return False
        return True

    client = RequestClientFactory.create(url)
    try:
        facts: dict[str, Any] = {
            "chunk_size": int(client.get_chunk_size().result(timeout=rest()))
        }
        if modes:
            # No process id is negative, so this is nobody's worker.
            calls = {m: getattr(client, c)(-os.getpid()) for m, c in _MODE_OF.items()}
            # The mode that RBLN needs gets all the time. The other call went out with
            # it, so its answer, if there is one, is not far behind.
            facts["modes"] = {
                "engine_driven": answered(calls["engine_driven"], rest()),
                "lmcache_driven": answered(calls["lmcache_driven"], 1.0),
            }
        return facts
    except TimeoutError:
        return {"error": f"{show(url)} accepts connections, but gives no answer"}
    finally:
        client.close()


def ask_http(url: str, timeout_s: float) -> dict[str, Any]:
    """Ask a server's HTTP port for its health and configuration.

    Returns:
        ``mode`` (as configured) and ``chunk_size`` where the server tells them; or
        ``error``.
    """
    base = (url if "://" in url else f"http://{url}").rstrip("/")
    shown = show(base)
    # A proxy is not asked for a server of one's own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    answers = []
    try:
        for page in ("healthcheck", "config"):
            with opener.open(f"{base}/{page}", timeout=timeout_s) as answer:
                answers.append(json.loads(answer.read(_MOST_HTTP)))
    except urllib.error.HTTPError as error:
        return {"error": f"{shown}: HTTP {error.code} {one_line(error.reason)}"}
    except urllib.error.URLError as error:
        return {"error": f"{shown}: {one_line(error.reason)}"}
    except json.JSONDecodeError as error:
        return {"error": f"{shown} does not answer with JSON: {error.msg}"}
    except Exception as error:
        # What is not HTTP fails in as many ways as there are.
        why = one_line(f"{type(error).__name__}: {error}")
        return {"error": f"{shown} does not answer as an LMCache server: {why}"}
    health, config = answers
    if not isinstance(health, dict) or not isinstance(config, dict):
        return {"error": f"{shown} answers with JSON that is no object"}
    if health.get("status") != "healthy":
        return {"error": f"{shown}: {show(health.get('status'), kind='name')}"}
    server = config.get("mp")
    if not isinstance(server, dict):
        return {"error": f"{shown}: its configuration has no part mp"}
    return {
        "mode": server.get("supported_transfer_mode"),
        "chunk_size": server.get("chunk_size"),
    }


def check_server(
    url: str | None,
    facts: Mapping[str, Any],
    http_url: str | None,
    http: Mapping[str, Any],
) -> Result:
    """Check that a server answers and serves engine-driven transfers.

    Args:
        url: The server's request channel, or None if it was not asked for.
        facts: What it answered there, as from :func:`ask`.
        http_url: The server's HTTP port, or None.
        http: What it answered there, as from :func:`ask_http`.
    """
    if not url and not http_url:
        return skip(_NAME, "not given; --server HOST:PORT or --http URL checks one")
    errors = [f["error"] for f in (facts, http) if f.get("error")]
    if errors:
        return fail(_NAME, "; ".join(errors), "an LMCache server that answers", _START)
    if http.get("mode"):
        mode = str(http["mode"])
        served = {
            "engine_driven": mode in ("engine_driven", "auto"),
            "lmcache_driven": mode in ("lmcache_driven", "auto"),
        }
    else:
        served = dict(facts.get("modes") or {})
    shown = " and ".join(mode for mode, is_served in served.items() if is_served)
    where = show(url or http_url)
    if not served.get("engine_driven"):
        return fail(
            _NAME,
            f"{where} serves {shown or 'no transfer mode'}",
            "engine_driven: RBLN workers get no answer in another mode",
            "start it with --supported-transfer-mode engine_driven",
            modes=served,
        )
    chunk = facts.get("chunk_size") or http.get("chunk_size")
    return ok(_NAME, f"{where} serves {shown}", modes=served, chunk_size=chunk)
