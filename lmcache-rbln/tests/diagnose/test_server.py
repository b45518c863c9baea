# SPDX-License-Identifier: Apache-2.0
"""What is asked of a server, and what its answers mean; see ``test_live`` too."""

# Standard
from typing import Any
import socket

# Third Party
import pytest

# First Party
from lmcache_rbln.diagnose.report import FAIL, OK, SKIP
from lmcache_rbln.diagnose.server import ask, check_server

SERVES = {"chunk_size": 256, "is_engine_driven": True}


def test_what_a_server_tells() -> None:
    assert check_server(None, {}).status == SKIP
    result = check_server("tcp://h:1", SERVES)
    assert (result.status, result.found) == (OK, "tcp://h:1 serves engine_driven")
    assert result.details["chunk_size"] == 256
    result = check_server("tcp://h:1", SERVES | {"is_engine_driven": False})
    assert result.status == FAIL
    assert "--supported-transfer-mode engine_driven" in result.fix
    result = check_server("tcp://h:1", {"error": "it broke"})
    assert (result.status, result.found) == (FAIL, "it broke")
    assert "lmcache server" in result.fix


def test_no_server_there_or_one_of_another_transport() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert "refused" in ask(f"tcp://127.0.0.1:{port}", 60)["error"]
        listener.listen()  # accepts, and never answers
        error = ask(f"tcp://127.0.0.1:{port}", 1)["error"]
        assert "gives no answer (tcp:// is ZMQ, grpc:// gRPC)" in error


@pytest.mark.parametrize(
    "address",
    [
        "tcp://",
        "[::1",
        "127.0.0.1",
        "127.0.0.1:99999",
        "h:x",
        "\0:1",
        "x" * 5000 + ":1",
    ],
)
def test_addresses_that_are_none(address: str) -> None:
    error = ask(f"tcp://{address}", 0.5)["error"]
    assert error
    assert "\n" not in error


def test_a_client_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    # First Party
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    closed: list[Any] = []

    class Client:
        def get_chunk_size(self) -> Any:
            raise TimeoutError

        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(RequestClientFactory, "create", lambda _: Client())
    assert "gives no answer" in ask("ipc:///tmp/x", 1)["error"]
    assert len(closed) == 1
