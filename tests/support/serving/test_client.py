# SPDX-License-Identifier: Apache-2.0
"""The HTTP client, against a server that answers as vLLM does, or does not."""

# Standard
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
import json

# Third Party
import pytest

# First Party
from tests.support.serving.client import (
    RequestFailedError,
    answers,
    complete,
    complete_together,
    get_json,
    parse_counters,
    post_json,
    read_counters,
)

PAGE = """\
# HELP vllm:hits_total Tokens.
# TYPE vllm:hits_total counter
vllm:hits_total{engine="0",model_name="a,b"} 5.0
vllm:hits_total{engine="1",model_name="a \\"b\\""} 7e2
plain_total 3
"""


class FakeVLLM(BaseHTTPRequestHandler):
    """Streams one token per event: the prompt's first tokens, each plus one."""

    def do_GET(self) -> None:
        body = PAGE.encode() if self.path == "/metrics" else b'{"status": "ok"}'
        self.send_response(503 if self.path == "/unhealthy" else 200)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/echo":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"got": request}).encode())
            return
        if request["model"] == "unknown":
            self.send_error(404)
            return
        assert request["stream"] and request["temperature"] == 0
        assert request["ignore_eos"] and request["return_token_ids"]
        self.send_response(200)
        self.end_headers()
        count = request["max_tokens"] - (request["model"] == "cut-short")
        for token in request["prompt"][:count]:
            if request["model"] == "failing":
                self._event({"error": {"message": "KV load failed"}})
                return
            self._event({"choices": [{"token_ids": [token + 1]}]})
        details = {"prompt_tokens_details": {"cached_tokens": 2}}
        self._event({"choices": [], "usage": details})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeVLLM)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def test_completion_is_joined_from_the_stream(port: int) -> None:
    completion = complete(port, "tiny", [10, 20, 30, 40], 3)
    assert completion.token_ids == (11, 21, 31)
    assert completion.cached_tokens == 2
    assert 0 < completion.ttft_s <= completion.total_s


def test_prompts_sent_together_keep_their_order(port: int) -> None:
    prompts = [[number, number] for number in range(8)]
    completions = complete_together(port, "tiny", prompts, 1)
    assert [c.token_ids for c in completions] == [(n + 1,) for n in range(8)]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("unknown", "HTTP 404"),
        ("failing", "KV load failed"),
        ("cut-short", "wanted 2 tokens, got 1"),
    ],
)
def test_failed_request_says_why(port: int, model: str, message: str) -> None:
    with pytest.raises(RequestFailedError, match=message):
        complete(port, model, [1, 2, 3], 2)


def test_nobody_listens() -> None:
    with pytest.raises(RequestFailedError, match="connection to vLLM lost"):
        complete(1, "tiny", [1], 1)
    assert not answers("http://127.0.0.1:1/health")


def test_health_and_json(port: int) -> None:
    base = f"http://127.0.0.1:{port}"
    assert answers(f"{base}/health")
    assert not answers(f"{base}/unhealthy")
    assert get_json(f"{base}/status") == {"status": "ok"}
    assert post_json(f"{base}/echo", {"tier": "l1"}) == {"got": {"tier": "l1"}}


def test_counters_add_up_over_labels(port: int) -> None:
    counters = read_counters(f"http://127.0.0.1:{port}/metrics")
    assert counters.total("vllm:hits_total") == 705
    assert counters.total("vllm:hits_total", engine="1") == 700
    assert counters.total("vllm:hits_total", model_name="a,b") == 5
    assert counters.total("plain_total") == 3


def test_missing_counter_is_not_zero() -> None:
    counters = parse_counters(PAGE)
    with pytest.raises(RequestFailedError, match="no metric vllm:misses_total"):
        counters.total("vllm:misses_total")
    with pytest.raises(RequestFailedError, match="'engine': '9'"):
        counters.total("vllm:hits_total", engine="9")
