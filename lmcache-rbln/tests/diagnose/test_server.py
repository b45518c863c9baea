# SPDX-License-Identifier: Apache-2.0
"""What is asked of a server, and what its answers mean."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
import json
import socket
import threading

# Third Party
import pytest

# First Party
from lmcache_rbln.diagnose import server
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

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{served.server_port}/"
    served.shutdown()
    thread.join()
    served.server_close()


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
        (HEALTHY | {"/config": (200, "[]")}, "no object"),
        (
            {
                "/healthcheck": (200, '{"status": "ill"}'),
                "/config": (200, "{}"),
            },
            "ill",
        ),
        (HEALTHY | {"/config": (200, '{"mp": 5}')}, "no part mp"),
        ({"/healthcheck": (200, "\\ud800" + "[" * 100000)}, "JSON"),
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


@contextmanager
def listener(talk: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port that says what it says, to any number of callers."""
    with socket.create_server(("127.0.0.1", 0)) as port:

        def serve() -> None:
            while True:
                try:
                    connection, _ = port.accept()
                except OSError:
                    return
                with connection, suppress(OSError):
                    talk(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield port.getsockname()[1]
        port.shutdown(socket.SHUT_RDWR)
    thread.join(60)


def says(*answers: bytes) -> Callable[[socket.socket], None]:
    """Answer, then wait for the other side to leave."""

    def talk(connection: socket.socket) -> None:
        for answer in answers:
            connection.sendall(answer)
        connection.settimeout(10)
        while connection.recv(100):
            pass

    return talk


GARBAGE = (
    b"\0" * 30,
    b"SSH-2.0-OpenSSH_9.6\r\n",
    bytes(range(256)),
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n\xff\xfe\0\0\0",
    b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}",
    b"HTTP/9.9 abc\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n",
    b"HTTP/1.1 302 x\r\nLocation: gopher://x\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 300000,
    b"",
)


@pytest.mark.parametrize("answer", GARBAGE, ids=range(len(GARBAGE)))
def test_a_port_that_is_not_http_is_one_line(answer: bytes) -> None:
    with listener(says(answer)) as port:
        error = ask_http(f"127.0.0.1:{port}", 0.5)["error"]
    assert error
    assert "\n" not in error
    assert len(error) < 400


@pytest.mark.parametrize(
    "url",
    ["", "http://", "http://[::1", "::1", "http://a b", "file:///etc/passwd", "ftp://x"]
    + [
        "http://127.0.0.1:99999",
        "http://127.0.0.1:x",
        "\0",
        "http://\ud800",
        "x" * 5000,
    ],
)
def test_urls_that_are_none(url: str) -> None:
    assert ask_http(url, 0.5)["error"]
    assert isinstance(connection_problem(server_url(url), 0.5), str)


ZMQ = b"\xff" + b"\0" * 8 + b"\x7f\x03"
HTTP2 = b"\0\0\x12\x04\0\0\0\0\0" + b"\0" * 18


@pytest.mark.parametrize(
    ("scheme", "answer", "problem"),
    [
        ("tcp", ZMQ, ""),
        ("grpc", HTTP2, ""),
        ("tcp", HTTP2, "the server speaks gRPC there; use grpc://"),
        ("grpc", ZMQ, "the server speaks ZMQ there; use tcp://"),
        ("tcp", b"HTTP/1.1 400 Bad\r\n", "speaks HTTP there, not the server's request"),
        ("tcp", b"garbage", ""),
        ("tcp", b"", ""),
    ],
)
def test_the_transport_is_named(
    scheme: str, answer: bytes, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_GREETING_S", 0.3 if not answer else 30.0)
    with listener(says(answer)) as port:
        found = connection_problem(f"{scheme}://127.0.0.1:{port}", 60)
    assert problem in found
    assert bool(problem) == bool(found)


def test_a_server_that_waits_for_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_GREETING_S", 0.3)

    def grpc(connection: socket.socket) -> None:
        connection.settimeout(30)
        if connection.recv(100).startswith(b"PRI * HTTP/2.0"):
            connection.sendall(HTTP2)
            connection.recv(100)

    with listener(grpc) as port:
        assert "use grpc://" in connection_problem(f"tcp://127.0.0.1:{port}", 60)


def test_a_client_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    # First Party
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    opened: list[Any] = []

    class Client:
        def __init__(self) -> None:
            self.closed = False
            opened.append(self)

        def get_chunk_size(self) -> Any:
            raise TimeoutError

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(RequestClientFactory, "create", lambda _: Client())
    assert "gives no answer" in server.ask(URL, True, 1)["error"]
    assert [client.closed for client in opened] == [True]
