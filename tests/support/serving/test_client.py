# SPDX-License-Identifier: Apache-2.0
"""An answer that is cut short or fails is no answer, a missing counter is not zero."""

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
    complete,
    complete_together,
    parse_counters,
)


class FakeVLLM(BaseHTTPRequestHandler):
    """Streams one token per event: the prompt's first tokens, each plus one."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if request["model"] == "unknown":
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        count = request["max_tokens"] - (request["model"] == "cut-short")
        events: list[Any] = [
            {"choices": [{"token_ids": [t + 1]}]} for t in request["prompt"]
        ]
        if request["model"] == "failing":
            events[0] = {"error": {"message": "KV load failed"}}
        usage = {"prompt_tokens_details": {"cached_tokens": 2}}
        for event in [*events[:count], {"choices": [], "usage": usage}]:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

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


def test_prompts_sent_together_keep_their_order(port: int) -> None:
    prompts = [[number, number + 10, 0] for number in range(8)]
    completions = complete_together(port, "tiny", prompts, 2)
    assert [c.token_ids for c in completions] == [(n + 1, n + 11) for n in range(8)]
    for one in completions:
        assert one.cached_tokens == 2
        assert 0 < one.ttft_s <= one.total_s


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


def test_counters_add_up_over_labels_and_a_missing_one_is_not_zero() -> None:
    counters = parse_counters(
        "# TYPE vllm:hits_total counter\n"
        'vllm:hits_total{engine="0",model_name="a,b"} 5.0\n'
        'vllm:hits_total{engine="1",model_name="a \\"b\\""} 7e2\n'
    )
    assert counters.total("vllm:hits_total") == 705
    assert counters.total("vllm:hits_total", engine="1") == 700
    with pytest.raises(RequestFailedError, match="no metric vllm:misses_total"):
        counters.total("vllm:misses_total")
    with pytest.raises(RequestFailedError, match="'engine': '9'"):
        counters.total("vllm:hits_total", engine="9")
