# SPDX-License-Identifier: Apache-2.0
"""What is asked of a server, and what its answers mean."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
import json
import socket
import threading

# Third Party
import pytest

# First Party
from lmcache_rbln.diagnose.result import Status
from lmcache_rbln.diagnose.server import (
    ask_http,
    check_server,
    connection_problem,
    server_url,
)

URL = "tcp://h:1"
HEALTHY = {"/healthcheck": (200, '{"status": "healthy"}')}


def modes(engine: bool, lmcache: bool) -> dict[str, Any]:
    served = {"engine_driven": engine, "lmcache_driven": lmcache}
    return {"chunk_size": 256, "modes": served}


@contextmanager
def http_server(pages: dict[str, tuple[int, str]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, text = pages.get(self.path, (404, "no"))
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_no_server_is_no_failure() -> None:
    assert check_server(None, {}, None, {}).status is Status.SKIP


@pytest.mark.parametrize(
    ("facts", "http", "found"),
    [
        (modes(True, False), {}, "serves engine_driven"),
        (modes(True, True), {}, "serves engine_driven and lmcache_driven"),
        ({"chunk_size": 256}, {"mode": "engine_driven"}, "serves engine_driven"),
        ({"chunk_size": 256}, {"mode": "auto"}, "engine_driven and lmcache_driven"),
    ],
)
def test_a_server_for_rbln(
    facts: dict[str, Any], http: dict[str, Any], found: str
) -> None:
    result = check_server(URL, facts, None, http)
    assert result.status is Status.OK
    assert result.found.endswith(found)
    assert result.details["chunk_size"] == 256


@pytest.mark.parametrize(
    ("facts", "http", "found"),
    [
        (modes(False, True), {}, "serves lmcache_driven"),
        (modes(False, False), {}, "serves no transfer mode"),
        ({"chunk_size": 256}, {"mode": "lmcache_driven"}, "serves lmcache_driven"),
    ],
)
def test_a_server_in_the_wrong_mode(
    facts: dict[str, Any], http: dict[str, Any], found: str
) -> None:
    result = check_server(URL, facts, None, http)
    assert result.status is Status.FAIL
    assert result.found.endswith(found)
    assert "--supported-transfer-mode engine_driven" in result.fix


@pytest.mark.parametrize(
    ("facts", "http"),
    [
        ({"error": "it broke"}, {}),
        ({}, {"error": "it broke"}),
        ({"error": "it broke"}, {"mode": "auto"}),
        (modes(True, True), {"error": "it broke"}),
    ],
)
def test_a_server_that_does_not_answer(
    facts: dict[str, Any], http: dict[str, Any]
) -> None:
    result = check_server(URL, facts, "http://h:2", http)
    assert (result.status, result.found) == (Status.FAIL, "it broke")
    assert "lmcache server" in result.fix


def test_urls_as_lmcache_wants_them() -> None:
    assert server_url("localhost:6555") == "tcp://localhost:6555"
    assert server_url("ipc:///tmp/x") == "ipc:///tmp/x"


def test_connections_that_can_and_cannot_be_made() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        refused = connection_problem(f"tcp://127.0.0.1:{port}", 60)
        assert "refused" in refused
        listener.listen()
        assert connection_problem(f"tcp://127.0.0.1:{port}", 60) == ""
    assert "no port" in connection_problem("tcp://127.0.0.1", 5)
    assert connection_problem("tcp://127.0.0.1:99999", 5)
    assert connection_problem("ipc:///tmp/x", 5) == ""


def test_the_configuration_that_http_tells() -> None:
    config = {"mp": {"supported_transfer_mode": "auto", "chunk_size": 512}}
    with http_server(HEALTHY | {"/config": (200, json.dumps(config))}) as url:
        assert ask_http(url, 60) == {"mode": "auto", "chunk_size": 512}
        assert ask_http(url.removeprefix("http://"), 60)["mode"] == "auto"


@pytest.mark.parametrize(
    ("pages", "error"),
    [
        ({}, "HTTP 404"),
        ({"/healthcheck": (503, "{}")}, "HTTP 503"),
        ({"/healthcheck": (200, "<html>")}, "Expecting value"),
        (HEALTHY | {"/config": (200, "[]")}, "has no attribute"),
        (
            {
                "/healthcheck": (200, '{"status": "ill"}'),
                "/config": (200, "{}"),
            },
            "ill",
        ),
    ],
)
def test_http_that_is_no_healthy_server(
    pages: dict[str, tuple[int, str]], error: str
) -> None:
    with http_server(pages) as url:
        assert error in ask_http(url, 60)["error"]


def test_http_that_is_not_there() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert "refused" in ask_http(url, 60)["error"]
        closed.listen()  # accepts, and never answers
        assert "timed out" in ask_http(url, 0.2)["error"]
