# SPDX-License-Identifier: Apache-2.0
"""--kv-transfer-config, and chunks of whole blocks."""

# Future
from __future__ import annotations

# Standard
from typing import Any
import json

# Third Party
import pytest

# First Party
from lmcache_rbln.diagnose.connector import (
    check_chunk,
    check_connector,
    read_connector,
)
from lmcache_rbln.diagnose.result import Status

IN_PROCESS = '{"kv_connector":"RBLNLMCacheConnectorV1","kv_role":"kv_both"}'


def with_server(**extra: Any) -> str:
    return json.dumps(
        {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                f"lmcache.mp.{key}": value for key, value in extra.items()
            },
        }
    )


def test_the_connectors_for_rbln() -> None:
    result = check_connector(read_connector(IN_PROCESS))
    assert result.status is Status.OK
    assert result.found == "RBLNLMCacheConnectorV1 (kv_both)"
    connector = read_connector(with_server(host="tcp://127.0.0.1", port=6555))
    assert connector.server == "tcp://127.0.0.1:6555"
    assert "server tcp://127.0.0.1:6555" in check_connector(connector).found


@pytest.mark.parametrize(
    ("text", "server"),
    [
        (with_server(), "tcp://localhost:5555"),
        (with_server(server_urls="tcp://a:1, tcp://b:2"), "tcp://a:1"),
        (with_server(server_urls=["tcp://c:3"], host="x"), "tcp://c:3"),
        (IN_PROCESS, None),
    ],
)
def test_the_server_that_a_connector_uses(text: str, server: str | None) -> None:
    assert read_connector(text).server == server


def test_no_connector_is_no_failure() -> None:
    assert check_connector(read_connector(None)).status is Status.SKIP


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{'kv_connector': 1}", "not JSON"),
        ("[]", "a JSON list"),
        ('{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}', "LMCacheConn"),
        ('{"kv_role": "kv_both"}', "no kv_connector"),
        ('{"kv_connector": "RBLNLMCacheConnectorV1"}', "kv_role=''"),
        ('{"kv_role": "kv_both", "kv_connector_extra_config": [1]}', "not an object"),
    ],
)
def test_a_connector_that_does_not_work(text: str, found: str) -> None:
    result = check_connector(read_connector(text))
    assert result.status is Status.FAIL
    assert found in result.found
    assert IN_PROCESS in result.fix


def test_a_multi_connector_is_not_looked_into() -> None:
    text = '{"kv_connector": "MultiConnector", "kv_role": "kv_both"}'
    assert check_connector(read_connector(text)).status is Status.WARN


@pytest.mark.parametrize(("chunk", "block"), [(256, 256), (1024, 128)])
def test_chunks_of_whole_blocks(chunk: int, block: int) -> None:
    result = check_chunk(chunk, "LMCACHE_CHUNK_SIZE", block)
    assert result.status is Status.OK
    assert f"chunk of {chunk} tokens" in result.found


@pytest.mark.parametrize(
    ("chunk", "source", "block", "fix"),
    [
        (256, "LMCACHE_CHUNK_SIZE", 1024, "export LMCACHE_CHUNK_SIZE=1024"),
        (1000, "server", 256, "start the server with --chunk-size 1024"),
        (0, "LMCACHE_CHUNK_SIZE", 256, "LMCACHE_CHUNK_SIZE"),
        (256, "LMCACHE_CHUNK_SIZE", 0, "--block-size"),
    ],
)
def test_chunks_of_other_sizes(chunk: int, source: str, block: int, fix: str) -> None:
    result = check_chunk(chunk, source, block)
    assert result.status is Status.FAIL
    assert fix in result.fix


def test_unknown_sizes_are_not_compared() -> None:
    assert check_chunk(None, "server", 256).status is Status.SKIP
    result = check_chunk(256, "LMCACHE_CHUNK_SIZE", None)
    assert result.status is Status.SKIP
    assert "--block-size" in result.found
