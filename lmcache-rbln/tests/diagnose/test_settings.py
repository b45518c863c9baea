# SPDX-License-Identifier: Apache-2.0
"""How the settings are reported; what is wrong with them, ``tests/settings`` says."""

# Standard
from typing import Any
import json

# Third Party
import pytest

# First Party
from lmcache_rbln.diagnose.report import FAIL, OK, SKIP, WARN, Result
from lmcache_rbln.diagnose.settings import (
    check_chunk,
    check_hash_seed,
    check_settings,
    examine,
)

IN_PROCESS = "RBLNLMCacheConnectorV1"
WITH_SERVER = "LMCacheMPConnector"


def facts(
    environment: dict[str, str] | None = None,
    connector: dict[str, Any] | None = None,
    name: str = IN_PROCESS,
    block: int | None = None,
) -> dict[str, Any]:
    found = examine(environment or {}, name, connector or {}, block)
    # As it comes out of the probe.
    loaded: dict[str, Any] = json.loads(json.dumps(found))
    return loaded


def check(*given: Any, **named: Any) -> Result:
    return check_settings(facts(*given, **named))


def test_the_hash_seed() -> None:
    assert check_hash_seed({}, IN_PROCESS, False).status == FAIL
    # It is not known yet whether LMCache will run in process.
    assert check_hash_seed({}, "", False).status == WARN
    # LMCache's server hashes with an algorithm that has no seed.
    assert check_hash_seed({}, WITH_SERVER, True).status == SKIP
    assert check_hash_seed({}, "", True).status == SKIP
    result = check_hash_seed({"PYTHONHASHSEED": "0"}, "", False)
    assert (result.status, result.found) == (OK, "PYTHONHASHSEED=0")


def test_the_documented_settings_are_shown_as_parsed() -> None:
    result = check(
        {
            "LMCACHE_LOCAL_CPU": " TRUE ",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": "5.0",
            "LMCACHE_CHUNK_SIZE": "1024",
        },
        {"lmcache.use_layerwise": "false"},
    )
    assert result.status == OK, result
    assert result.details["values"] == {
        "local_cpu": "True",
        "max_local_cpu_size": "5.0",
        "chunk_size": "1024",
        "use_layerwise": "False",
    }
    assert "chunk_size=1024" in result.found


def test_defaults() -> None:
    assert check().found == "LMCache's defaults"


def test_every_problem_is_named() -> None:
    result = check({"LMCACHE_LOCAL_CPU": "yes", "LMCACHE_CHUNK_SIZE": "k"})
    assert result.status == FAIL
    for name in ("LMCACHE_LOCAL_CPU", "LMCACHE_CHUNK_SIZE"):
        assert name in result.found
        assert name in result.fix


def test_what_has_no_effect_is_a_warning() -> None:
    assert check({"LMCACHE_ZZZZZZ": "1"}).status == WARN
    both = check({"LMCACHE_ZZZZZZ": "1", "LMCACHE_USE_LAYERWISE": "1"})
    assert both.status == FAIL
    assert both.found.index("layer-wise") < both.found.index("LMCACHE_ZZZZZZ")


def test_an_lmcache_that_is_not_there() -> None:
    result = check_settings({"error": "ImportError: no lmcache"})
    assert result.status == FAIL
    assert "no lmcache" in result.found


def test_the_connector_decides_which_settings_count() -> None:
    settings = {"LMCACHE_CHUNK_SIZE": "k"}
    mode = {"LMCACHE_MP_TRANSFER_MODE": "lmcache_driven"}
    assert check(settings, name=WITH_SERVER).status == WARN
    assert check(settings, name="").status == FAIL
    assert check(mode, name=WITH_SERVER).status == FAIL
    assert check(mode, name="").status == FAIL
    assert check(mode).status == OK


@pytest.mark.parametrize(("chunk", "block"), [("256", 256), ("1024", 128)])
def test_chunks_of_whole_blocks(chunk: str, block: int) -> None:
    found = facts({"LMCACHE_CHUNK_SIZE": chunk}, block=block)
    result = check_chunk(found, None, False, block)
    assert result.status == OK
    assert f"chunk of {chunk} tokens (LMCACHE_CHUNK_SIZE)" in result.found


@pytest.mark.parametrize(
    ("environment", "connector", "fix"),
    [
        ({}, {}, "set LMCACHE_CHUNK_SIZE to 1024"),
        (
            {},
            {"lmcache.chunk_size": 1500},
            "set lmcache.chunk_size in kv_connector_extra_config to 2048",
        ),
    ],
)
def test_chunks_of_other_sizes(
    environment: dict[str, str], connector: dict[str, Any], fix: str
) -> None:
    found = facts(environment, connector, block=1024)
    result = check_chunk(found, None, False, 1024)
    assert result.status == FAIL
    assert fix in result.fix
    assert "--block-size" in result.fix
    # It is said once.
    assert check_settings(found).status == OK


def test_the_chunk_size_of_a_server() -> None:
    found = facts(name=WITH_SERVER, block=256)
    result = check_chunk(found, 1000, True, 256)
    assert result.status == FAIL
    assert "start the server with --chunk-size 1024" in result.fix
    assert check_chunk(found, 1024, True, 256).status == OK


@pytest.mark.parametrize("chunk", [None, "256", 0, [1]])
def test_unknown_sizes_are_not_compared(chunk: Any) -> None:
    assert check_chunk({}, chunk, True, 256).status == SKIP
    result = check_chunk(facts(), None, False, None)
    assert result.status == SKIP
    assert "--block-size" in result.found
