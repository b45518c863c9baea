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

_NAME = "server"
_START = "start it: lmcache server --supported-transfer-mode engine_driven ..."
_MODE_OF = {
    "engine_driven": "unregister_kv_cache_engine_driven_context",
    "lmcache_driven": "unregister_kv_cache",
}


def server_url(text: str) -> str:
    """Return a server's URL as LMCache's client wants it: ``host:port`` gets tcp."""
    return text if "://" in text else f"tcp://{text}"


def connection_problem(url: str, timeout_s: float) -> str:
    """Tell why no TCP connection to a server can be made, or return an empty text.

    ZMQ itself tries for ever and says nothing.
    """
    scheme, _, address = url.partition("://")
    if scheme not in ("tcp", "grpc"):
        return ""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s):
            return ""
    except ValueError:
        return f"{url}: no port"
    except OverflowError as error:
        return f"{url}: {error}"
    except OSError as error:
        return f"{url}: {error.strerror or error}"


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

    client = RequestClientFactory.create(url)

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
        return {"error": f"{url} accepts connections, but gives no answer"}
    finally:
        client.close()


def ask_http(url: str, timeout_s: float) -> dict[str, Any]:
    """Ask a server's HTTP port for its health and configuration.

    Returns:
        ``mode`` (as configured) and ``chunk_size`` where the server tells them; or
        ``error``.
    """
    base = url if "://" in url else f"http://{url}"
    base = base.rstrip("/")
    # A proxy is not asked for a server of one's own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{base}/healthcheck", timeout=timeout_s) as answer:
            health = json.load(answer)
        with opener.open(f"{base}/config", timeout=timeout_s) as answer:
            config = json.load(answer)
        if health.get("status") != "healthy":
            return {"error": f"{base}: {one_line(health)}"}
        server = config.get("mp") or {}
        return {
            "mode": server.get("supported_transfer_mode"),
            "chunk_size": server.get("chunk_size"),
        }
    except urllib.error.HTTPError as error:
        return {"error": f"{base}: HTTP {error.code} {error.reason}"}
    except urllib.error.URLError as error:
        return {"error": f"{base}: {one_line(error.reason)}"}
    except (OSError, ValueError, AttributeError) as error:
        return {"error": f"{base}: {one_line(error) or type(error).__name__}"}


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
    where = url or http_url
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
