# SPDX-License-Identifier: Apache-2.0
"""What LMCache's client makes of requests whose connection is lost."""

# Standard
from collections.abc import Iterator
from typing import Any
import socket

# Third Party
import pytest
import zmq

# First Party
from lmcache.v1.multiprocess.transport.zmq_impl.client import ZmqMultiprocessClient
from lmcache.v1.multiprocess.transport.zmq_impl.mq import MessageQueueClient

#: Nothing that is awaited takes longer, unless it never comes.
SOON_S = 120.0


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as made:
        yield made


def listening(context: zmq.Context, port: int) -> zmq.Socket:
    """The socket of a server; port 0 chooses one."""
    socket = context.socket(zmq.ROUTER)
    socket.rcvtimeo = int(SOON_S * 1000)
    socket.linger = 0
    socket.bind(f"tcp://127.0.0.1:{port or '*'}")
    return socket


def client_of(address: str, context: zmq.Context) -> Any:
    # Its requests are made when the class is.
    made: Any = ZmqMultiprocessClient
    return made(MessageQueueClient(address, context))


def test_they_wait_for_the_first_server(context: zmq.Context) -> None:
    """Whatever else takes the connection before, as a proxy does."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        port = proxy.getsockname()[1]
        address = f"tcp://127.0.0.1:{port}"
        client = client_of(address, context)
        asked = client.ping(1)
        for _ in range(2):
            proxy.accept()[0].close()
    try:
        with listening(context, port) as server:
            identity, request, operation, *_ = server.recv_multipart()
            server.send_multipart([identity, request, operation, b"\xc3"])
            assert asked.result(SOON_S) is True
    finally:
        client.close()


def test_they_fail_and_the_next_server_is_asked(context: zmq.Context) -> None:
    server = listening(context, 0)
    address = str(server.getsockopt_string(zmq.LAST_ENDPOINT))
    client = client_of(address, context)
    try:
        asked = client.ping(1)
        server.recv_multipart()
        assert not asked.query()
        server.close()
        with pytest.raises(TimeoutError, match="ping.*connection"):
            asked.result(SOON_S)
        # Waits for another server, whose answer is its own.
        asked = client.ping(1)
        with listening(context, int(address.rpartition(":")[2])) as server:
            identity, request, operation, *_ = server.recv_multipart()
            server.send_multipart([identity, request, operation, b"\xc3"])
            assert asked.result(SOON_S) is True
    finally:
        client.close()
