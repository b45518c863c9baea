# SPDX-License-Identifier: Apache-2.0
"""The LMCache server: is it there, and does it serve RBLN workers?"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping
from typing import Any
import os
import socket

# Local
from lmcache_rbln.diagnose.report import FAIL, OK, SKIP, Result, one_line
from lmcache_rbln.settings.masking import show

_MODE = "--supported-transfer-mode engine_driven"


def ask(url: str | None, timeout_s: float) -> dict[str, Any]:
    """Ask a server over its request channel. Runs in the LMCache probe.

    Whether it serves engine-driven transfers is tried with a call that ends the
    registration of a worker that does not exist: the server answers it if it does, and
    does nothing but log it.

    Args:
        url: The server, for example ``tcp://localhost:6555``; None asks nothing.
        timeout_s: How long to wait for each answer.

    Returns:
        ``chunk_size`` and ``is_engine_driven``; or ``error``.
    """
    if not url:
        return {}
    if url.startswith(("tcp://", "grpc://")):
        # ZMQ itself tries for ever and says nothing.
        host, _, port = url.partition("://")[2].rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
        except (OSError, ValueError, OverflowError) as error:
            why = "no port" if isinstance(error, ValueError) else error
            return {"error": one_line(f"{show(url)}: {why}")}
    # First Party
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    client = RequestClientFactory.create(url)
    try:
        chunk_size = int(client.get_chunk_size().result(timeout=timeout_s))
        # No process id is negative, so this is nobody's worker.
        call = client.unregister_kv_cache_engine_driven_context(-os.getpid())
        is_engine_driven = True
        try:
            call.result(timeout=timeout_s)
        except Exception:
            is_engine_driven = False
        return {"chunk_size": chunk_size, "is_engine_driven": is_engine_driven}
    except TimeoutError:
        return {"error": f"{show(url)} gives no answer (tcp:// is ZMQ, grpc:// gRPC)"}
    finally:
        client.close()


def check_server(url: str | None, facts: Mapping[str, Any]) -> Result:
    """Check that a server answers and serves engine-driven transfers.

    Args:
        url: The server; None if none was given.
        facts: What :func:`ask` returned, or ``error``.
    """
    if not url:
        return Result(SKIP, "not given; --server HOST:PORT checks one")
    if facts.get("error"):
        found, wanted = one_line(facts["error"]), "an LMCache server that answers"
        return Result(FAIL, found, wanted, f"start it: lmcache server {_MODE} ...")
    if not facts.get("is_engine_driven"):
        found = f"{show(url)} does not serve engine_driven"
        wanted = "engine_driven: RBLN workers get no answer in another mode"
        return Result(FAIL, found, wanted, f"start it with {_MODE}")
    return Result(OK, f"{show(url)} serves engine_driven", details=dict(facts))
