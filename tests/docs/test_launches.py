# SPDX-License-Identifier: Apache-2.0
"""The documented launches against what the tests start."""

# Standard
from pathlib import Path
import json

# Third Party
import pytest

# First Party
from tests.support.documents import (
    EXTENSION_PAGE,
    RDS_PAGE,
    USER_PAGE,
    Launch,
    launch,
)
from tests.support.serving.servers import (
    CacheServer,
    CacheServerConfig,
    Engine,
    EngineConfig,
)

IN_PROCESS = {"kv_connector": "RBLNLMCacheConnectorV1", "kv_role": "kv_both"}


def options(command: list[str]) -> dict[str, str | None]:
    """Options by name, with their values; words before the first are left out."""
    found: dict[str, str | None] = {}
    for word, following in zip(command, [*command[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = None if following.startswith("--") else following
    return found


@pytest.mark.parametrize("page", [EXTENSION_PAGE, RDS_PAGE], ids=lambda p: p.name)
def test_in_process_launches_differ_in_the_storage_alone(page: Path) -> None:
    documented = launch(page)
    assert options(documented.command("vllm", "serve")) == {
        "--model-impl": "vllm",
        "--max-model-len": "8192",
        "--block-size": "1024",
        "--enable-prefix-caching": None,
        "--max-num-batched-tokens": "128",
        "--max-num-seqs": "4",
        "--kv-transfer-config": documented.command("vllm", "serve")[-1],
    }
    assert json.loads(documented.command("vllm", "serve")[-1]) == IN_PROCESS
    assert documented.env["PYTHONHASHSEED"] == "0"
    assert documented.env["LMCACHE_CHUNK_SIZE"] == "1024"
    assert documented.env["LMCACHE_USE_LAYERWISE"] == "False"


def multiprocess() -> Launch:
    return launch(USER_PAGE)


def test_the_stack_is_started_as_the_user_page_says(tmp_path: Path) -> None:
    """But for numbers and addresses, every documented option is that of the tests."""
    config = CacheServerConfig(chunk_size=128, shm_name="rbln", l1_size_gb=32)
    cache = CacheServer(config, {}, tmp_path, port=6555)
    started = options(cache.process.command)
    documented = options(multiprocess().command("lmcache", "server"))
    assert documented.pop("--chunk-size") == "N"
    assert documented.items() <= started.items()
    assert multiprocess().env == {"LMCACHE_DEVICE_BACKEND": "rbln"}

    settings = EngineConfig(tmp_path, 128, max_model_len=1, max_seqs=1, num_blocks=1)
    engine = Engine(settings, 6555, {}, tmp_path)
    started = options(engine.process.command)
    documented = options(multiprocess().command("vllm", "serve"))
    assert documented.pop("--block-size") == "N"
    wanted, got = (o.pop("--kv-transfer-config") or "" for o in (documented, started))
    assert json.loads(wanted) == json.loads(got)
    assert documented.items() <= started.items()
