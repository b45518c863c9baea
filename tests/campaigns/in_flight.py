# SPDX-License-Identifier: Apache-2.0
"""Requests that are being answered while their engine is stopped."""

# Standard
from contextlib import suppress
import http.client
import json
import socket
import threading

# First Party
from tests.support.serving.servers import HOST, Engine

PROMPTS = (range(3, 403), range(50, 450))


class InFlight:
    """Two requests, of whose answers some has come.

    Args:
        engine: Who answers.
        answer_tokens: How many tokens each asks for.

    Raises:
        ServerFailedError: If an answer does not begin.
    """

    def __init__(self, engine: Engine, answer_tokens: int) -> None:
        self._wanted = answer_tokens
        self._requests = [_Request(engine, prompt, answer_tokens) for prompt in PROMPTS]
        for request in self._requests:
            if not request.begun.wait(120.0):
                raise engine.process.failure("answered nothing")

    def hang_up(self) -> None:
        """Let the clients go away."""
        for request in self._requests:
            with suppress(OSError):
                request.socket.shutdown(socket.SHUT_RDWR)

    def cut_short(self) -> list[str]:
        """Say which answers did not come whole."""
        for request in self._requests:
            request.thread.join(10.0)
        return [
            f"an answer of {request.tokens} tokens, wanted {self._wanted}"
            for request in self._requests
            if request.tokens != self._wanted
        ]


class _Request:
    def __init__(self, engine: Engine, prompt: range, answer_tokens: int) -> None:
        self.begun = threading.Event()
        self.tokens = 0
        self._body = {
            "model": engine.served_name,
            "prompt": list(prompt),
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        self._connection = http.client.HTTPConnection(HOST, engine.port, timeout=300)
        self._connection.connect()
        self.socket = self._connection.sock
        self.thread = threading.Thread(target=self._ask, daemon=True)
        self.thread.start()

    def _ask(self) -> None:
        # Stopped in the middle, as is wanted.
        with suppress(OSError, http.client.HTTPException):
            headers = {"Content-Type": "application/json"}
            body = json.dumps(self._body)
            self._connection.request("POST", "/v1/completions", body, headers)
            for line in self._connection.getresponse():
                self._note(line)

    def _note(self, line: bytes) -> None:
        if not line.startswith(b"data: {"):
            return
        event = json.loads(line.removeprefix(b"data: "))
        for choice in event.get("choices", []):
            self.tokens += len(choice.get("token_ids") or [])
        if self.tokens:
            self.begun.set()
