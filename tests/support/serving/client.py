# SPDX-License-Identifier: Apache-2.0
"""HTTP to both servers: streamed completions, counters and status."""

# Standard
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
import http.client
import json
import time
import urllib.error
import urllib.request

# Third Party
from prometheus_client.parser import text_string_to_metric_families


class RequestFailedError(RuntimeError):
    """A server answered with an error, or with something unexpected."""


@dataclass(frozen=True)
class Completion:
    """One answered prompt.

    Attributes:
        token_ids: The generated tokens.
        ttft_s: Seconds from sending the request to the first generated token.
        total_s: Seconds to the end of the answer.
        cached_tokens: Prompt tokens that vLLM did not compute.
        times_s: Seconds from sending the request, for each token.
    """

    token_ids: tuple[int, ...]
    ttft_s: float
    total_s: float
    cached_tokens: int
    times_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Counters:
    """A reading of a Prometheus ``/metrics`` page."""

    samples: tuple[tuple[str, dict[str, str], float], ...]

    def total(self, name: str, **labels: str) -> float:
        """Add up the samples of a metric.

        Args:
            name: Full name of the metric.
            **labels: Labels that a sample must carry.

        Returns:
            The sum.

        Raises:
            RequestFailedError: If the page has no such sample, so that a
                renamed counter is never taken for zero.
        """
        values = [
            value
            for sample, sample_labels, value in self.samples
            if sample == name and labels.items() <= sample_labels.items()
        ]
        if not values:
            raise RequestFailedError(f"no metric {name} with labels {labels}")
        return sum(values)


def answers(url: str, timeout_s: float = 2.0) -> bool:
    """Whether a GET of ``url`` succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        return False


def get_json(url: str, timeout_s: float = 60.0) -> Any:
    """GET ``url`` and parse the JSON that it returns."""
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        return json.load(response)


def post_json(
    url: str,
    body: Any,
    timeout_s: float = 60.0,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """POST ``body`` as JSON to ``url`` and parse the JSON that it returns."""
    request = urllib.request.Request(
        url,
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.load(response)


def read_counters(url: str, timeout_s: float = 60.0) -> Counters:
    """GET a Prometheus page.

    Args:
        url: Address of the page.
        timeout_s: Longest wait in seconds.

    Returns:
        Its samples.
    """
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        return parse_counters(response.read().decode())


def parse_counters(page: str) -> Counters:
    """Parse a page of the Prometheus text format."""
    return Counters(
        tuple(
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        )
    )


def complete(
    port: int,
    model: str,
    prompt: Sequence[int],
    max_tokens: int,
    cache_salt: str | None = None,
    timeout_s: float = 300.0,
) -> Completion:
    """Send one prompt and stream its greedy completion.

    Args:
        port: Port of ``vllm serve`` on this host.
        model: Served model name.
        prompt: Prompt as token ids.
        max_tokens: Number of tokens to generate; the end token is ignored.
        cache_salt: Shares KV with requests of the same salt only.
        timeout_s: Longest silence in seconds.

    Returns:
        The completion with its times.

    Raises:
        RequestFailedError: If the server refuses or the stream is cut short.
    """
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    tokens: list[int] = []
    usage: dict[str, Any] = {}
    times: list[float] = []
    start = time.perf_counter()
    try:
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps(body),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        if response.status != 200:
            text = response.read().decode(errors="replace")
            raise RequestFailedError(f"HTTP {response.status}: {text[:500]}")
        for line in response:
            event = _event(line)
            if event is None:
                continue
            if "error" in event:
                raise RequestFailedError(f"error in the stream: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                new = choice.get("token_ids") or []
                tokens.extend(new)
                times += [time.perf_counter() - start] * len(new)
    except (OSError, http.client.HTTPException) as error:
        raise RequestFailedError(f"connection to vLLM lost: {error!r}") from error
    finally:
        connection.close()
    if len(tokens) != max_tokens:
        raise RequestFailedError(f"wanted {max_tokens} tokens, got {len(tokens)}")
    details = usage.get("prompt_tokens_details") or {}
    return Completion(
        token_ids=tuple(tokens),
        ttft_s=times[0] if times else 0.0,
        total_s=time.perf_counter() - start,
        cached_tokens=int(details.get("cached_tokens") or 0),
        times_s=tuple(times),
    )


def complete_together(
    port: int,
    model: str,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    cache_salt: str | None = None,
) -> list[Completion]:
    """Send several prompts at the same time.

    Args:
        port: Port of ``vllm serve`` on this host.
        model: Served model name.
        prompts: Prompts as token ids.
        max_tokens: Number of tokens to generate for each.
        cache_salt: Shares KV with requests of the same salt only.

    Returns:
        The completions in the order of the prompts.

    Raises:
        RequestFailedError: If any of them fails.
    """
    with ThreadPoolExecutor(max_workers=len(prompts)) as pool:
        futures = [
            pool.submit(complete, port, model, prompt, max_tokens, cache_salt)
            for prompt in prompts
        ]
        return [future.result() for future in futures]


def _event(line: bytes) -> dict[str, Any] | None:
    """Decode one line of a server-sent event stream; ``None`` if it has no data."""
    text = line.decode().strip()
    if not text.startswith("data:"):
        return None
    payload = text.removeprefix("data:").strip()
    if payload == "[DONE]":
        return None
    event = json.loads(payload)
    return event if isinstance(event, dict) else None
