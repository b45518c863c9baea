# SPDX-License-Identifier: Apache-2.0
"""--kv-transfer-config."""

# Standard
from typing import Any
import json

# Third Party
import pytest

# First Party
from lmcache_rbln.diagnose.connector import check_connector, read_connector
from lmcache_rbln.diagnose.report import FAIL, OK, SKIP, WARN, Result

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


def check(text: str | None, **vllm: Any) -> Result:
    return check_connector(read_connector(text), vllm)


def test_the_connectors_for_rbln() -> None:
    result = check(IN_PROCESS)
    assert result.status == OK
    assert result.found == "RBLNLMCacheConnectorV1 (kv_both)"
    text = with_server(host="tcp://127.0.0.1", port=6555)
    assert read_connector(text).server == "tcp://127.0.0.1:6555"
    assert "server tcp://127.0.0.1:6555" in check(text).found


@pytest.mark.parametrize(
    ("text", "server"),
    [
        (with_server(), "tcp://localhost:5555"),
        (with_server(server_urls="tcp://a:1, tcp://b:2"), "tcp://a:1"),
        (with_server(server_urls=["tcp://c:3"], host="x"), "tcp://c:3"),
        (with_server(server_urls=5), "5"),
        (IN_PROCESS, None),
    ],
)
def test_the_server_that_a_connector_uses(text: str, server: str | None) -> None:
    assert read_connector(text).server == server


def test_no_connector_is_no_failure() -> None:
    assert check(None).status == SKIP


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{'kv_connector': 1}", "not JSON"),
        ("[" * 100000, "not JSON"),
        ("[]", "a JSON list"),
        ('{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}', "LMCacheConn"),
        ('{"kv_role": "kv_both"}', "no kv_connector"),
        ('{"kv_role": "kv_both", "kv_connector_extra_config": [1]}', "not an object"),
    ],
)
def test_a_connector_that_does_not_work(text: str, found: str) -> None:
    result = check(text)
    assert result.status == FAIL
    assert found in result.found
    assert IN_PROCESS in result.fix


@pytest.mark.parametrize(
    ("vllm", "found"),
    [
        ({"error": "ImportError: libcudart.so.12"}, "import vllm: ImportError"),
        ({"refused": "kv_load_failure_policy: Input should be"}, "kv_load_failure"),
        ({"unloadable": "ModuleNotFoundError: No module"}, "No module"),
    ],
)
def test_what_vllm_says_of_it(vllm: dict[str, str], found: str) -> None:
    result = check(IN_PROCESS, **vllm)
    assert result.status == FAIL
    assert found in result.found
    assert result.fix


def test_a_vllm_that_was_not_asked() -> None:
    result = check_connector(read_connector(IN_PROCESS), None)
    assert result.status == SKIP
    assert "torch" in result.found


def test_a_vllm_that_is_broken_fails_without_a_connector_too() -> None:
    assert check(None, error="ImportError: x").status == FAIL


@pytest.mark.parametrize(("policy", "status"), [("recompute", OK), (None, WARN)])
def test_a_connector_in_a_multi_connector(policy: str | None, status: str) -> None:
    inner = json.loads(IN_PROCESS) | {"kv_connector_extra_config": {"a": 1}}
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": ["odd", {}, inner]},
    }
    if policy:
        config["kv_load_failure_policy"] = policy
    assert read_connector(json.dumps(config)).extra == {"a": 1}
    result = check(json.dumps(config))
    assert result.status == status
    if status == WARN:
        assert "kv_load_failure_policy" in result.fix


@pytest.mark.parametrize("connectors", [None, 5, [], ["odd"], [{"kv_connector": 1}]])
def test_a_multi_connector_without_one_for_rbln(connectors: Any) -> None:
    extra = {"connectors": connectors}
    config = {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}
    assert check(json.dumps(config)).status == FAIL
