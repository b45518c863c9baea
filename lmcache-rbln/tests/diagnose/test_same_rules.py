# SPDX-License-Identifier: Apache-2.0
"""The engine and the diagnostic say the same of 300 configurations, and LMCache of
those that they accept.
"""

# Standard
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import json
import os
import random

# Third Party
import pytest
import yaml
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

# First Party
from lmcache_rbln.diagnose.report import FAIL
from lmcache_rbln.diagnose.settings import check_chunk, check_settings, examine
from lmcache_rbln.settings import table
from lmcache.integration.vllm import utils
from lmcache_rbln._lmcache import in_process
from lmcache_rbln.integration.vllm import connector, requests, service
from lmcache_rbln.settings.check import examine as all_settings

pytestmark = pytest.mark.npu
IN_PROCESS = "RBLNLMCacheConnectorV1"
CONFIGURATIONS = 300
SECRET = "hunter2-Zx9"
RDS = {
    "storage_plugin.R.module_path": "lmcache_rbln.storage_plugin.rds_backend",
    "storage_plugin.R.class_name": "RDSBackend",
}
BLOCKS = (16, 128, 1024)
# What each kind of value may be, and what it may not.
GOOD: dict[Any, tuple[Any, ...]] = {
    int: (1, "256", " 512 ", 1024.0),
    float: (0.5, 5, "5.0", "1e1"),
    bool: (True, "False", 1, "0", " TRUE "),
    str: ("name", "/tmp/a"),
    list: ("name", ["name"], "1,2", [1, 2], None),
}
BAD: dict[Any, tuple[Any, ...]] = {
    int: ("abc", "256.5", "", 1.5, True, [1], {"a": SECRET}, "1k", "9" * 5000),
    float: ("five", "nan", "5GB", "", True, [], "-inf"),
    bool: ("yes", "on", "", 2, 1.0, [True], "Flase"),
    str: ([SECRET], {"password": SECRET}, True),
    list: ({"password": SECRET}, True, [f"redis://u:{SECRET}@h"], 1.5),
}
EXTRA: tuple[tuple[str, Any], ...] = (
    ("rds_buffer_size", 64),
    ("rds_buffer_size", "2048"),
    ("rds_failure_policy", SECRET),
    ("rds_bufer_size", 64),
    ("lmcache_rbln.allow_degraded", "yes"),
    ("lmcache_rbln.allow_degraded", True),
    ("lmcache_rbln.load_failure_policy", SECRET),
    ("lmcache_rbln.alow_degraded", True),
    ("save_only_first_rank", True),
    ("save_only_first_rank", False),
    ("save_only_first_rank", "false"),
    ("enable_nixl_storage", True),
    ("lmcache.chunk_size", 128),
    ("redis_password", SECRET),
    ("apikey", SECRET),
    ("hosts", [f"redis://user:{SECRET}@host:1"]),
    ("s3_key", SECRET),
)
CONNECTOR: tuple[tuple[str, Any], ...] = (
    ("lmcache.max_tokens_per_load", 4096),
    ("lmcache.max_tokens_per_load", 1),
    ("lmcache.max_tokens_per_load", "many"),
    ("lmcache.mp.port", 5555),
    ("lmcache.chunk_sise", 256),
    ("chunk_size", 256),
    ("rds_buffer_size", 64),
    ("storage_plugin.R.module_path", SECRET),
    ("discard_partial_chunks", "no"),
    ("skip_last_n_tokens", -1),
    ("lmcache_rbln.allow_degraded", "perhaps"),
    ("somebody_elses", SECRET),
)
VARIABLES = (
    ("LMCACHE_CHUNKSIZE", "256"),
    ("LMCACHE_ZZZZ", SECRET),
    ("LMCACHE_MAX_TOKENS_PER_LOAD", "256"),
    ("LMCACHE_ENABLE_XPYD", "True"),
    ("LMCACHE_EXTERNAL_BACKENDS", "R"),
    ("LMCACHE_LOG_LEVEL", "INFO"),
    ("LMCACHE_RBLN_STAGING_MIB", SECRET),
    ("LMCACHE_RBLN_KV_LAYOUT", "kv_first"),
    ("LMCACHE_DEVICE_BACKEND", "rbln"),
    ("LMCACHE_CONFIG_FILE", f"/no/such/{'file'}"),
)


@dataclass
class Configuration:
    """A configuration in its three places."""

    environment: dict[str, str] = field(default_factory=dict)
    connector: dict[str, Any] = field(default_factory=dict)
    file: dict[Any, Any] = field(default_factory=dict)
    block: int = 128


def value_of(name: str, dice: random.Random) -> Any:
    definition = table.definitions()[name]
    kind = definition["type"]
    for plain in (list, bool, int, float):
        if plain.__name__ in str(kind):
            kind = plain
            break
    draw = dice.random()
    if name in table.OFF and draw < 0.6:
        return None if kind is str or "Optional" in str(kind) else False
    if name == "chunk_size" and draw < 0.9:
        return dice.choice([1024, 1024, 2048, "3072", 1000])
    if name in table.WORDS and draw < 0.9:
        return dice.choice([*table.WORDS[name], "no such word"])
    if name in table.RANGES and draw < 0.9:
        low, high, _ = table.RANGES[name]
        return dice.choice([high, high, max(low, 1), max(low, 1), -1, high + 1])
    values = GOOD if draw < 0.93 else BAD
    return dice.choice(values.get(kind, values[str]))


def generated(seed: int) -> Configuration:
    dice = random.Random(seed)
    made = Configuration(block=dice.choice(BLOCKS))
    extra: dict[str, Any] = {}
    if dice.random() < 0.3:
        # What most users of RDS have, and some of them wrong.
        extra |= dict(RDS)
        made.environment["LMCACHE_STORAGE_PLUGINS"] = dice.choice(["R", "R", "R,Q"])
        if dice.random() < 0.8:
            made.environment["LMCACHE_LOCAL_CPU"] = "False"
            made.environment["LMCACHE_MAX_LOCAL_CPU_SIZE"] = dice.choice(
                ["0", "0", "5"]
            )
        if dice.random() < 0.2:
            extra["storage_plugin.R.class_name"] = dice.choice(["RDSBackends", 5, ""])
    names = list(table.definitions())
    for _ in range(dice.choice([0, 1, 1, 2, 3])):
        name = dice.choice([*table.RANGES, *table.WORDS, *table.OFF, *names])
        if name == "extra_config":
            continue
        value = value_of(name, dice)
        place = dice.choice(["environment", "environment", "connector", "file"])
        if place == "environment":
            if value is not None:
                made.environment[f"LMCACHE_{name.upper()}"] = str(value)
        elif place == "connector":
            made.connector[f"lmcache.{name}"] = value
        else:
            made.file[name] = value
    if dice.random() < 0.2:
        extra.update([dice.choice(EXTRA)])
    if dice.random() < 0.12:
        made.connector.update([dice.choice(CONNECTOR)])
    if dice.random() < 0.1:
        made.environment.update([dice.choice(VARIABLES)])
    if dice.random() < 0.05:
        made.file[dice.choice([1, "chunk_sise", "zzzz", "ec_chunk_size"])] = 2
    if extra:
        place = dice.choice(["environment", "environment", "file", "connector"])
        if place == "environment":
            text = json.dumps(extra)
            made.environment["LMCACHE_EXTRA_CONFIG"] = (
                text if dice.random() < 0.9 else text.replace("}", ",}")
            )
        elif place == "file":
            made.file["extra_config"] = extra
        else:
            made.connector["lmcache.extra_config"] = dice.choice(
                [extra, json.dumps(extra)]
            )
    return made


@pytest.fixture
def place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[Configuration], None]:
    """Puts a configuration where the processes of a server would have it."""

    def put(configuration: Configuration) -> None:
        for name in [n for n in os.environ if n.startswith("LMCACHE_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PYTHONHASHSEED", "0")
        if configuration.file:
            file = tmp_path / "lmcache.yaml"
            file.write_text(yaml.safe_dump(configuration.file))
            monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
        for name, value in configuration.environment.items():
            monkeypatch.setenv(name, value)

    return put


class ReachedStartError(Exception):
    """The connector's checks are over; LMCache would start."""


@pytest.fixture
def start_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Configuration], Any]:
    """Starts the engine's connector up to where LMCache would start.

    It returns LMCache's configuration, or raises the refusal.
    """

    def stock(*_: Any, **__: Any) -> None:
        raise ReachedStartError

    monkeypatch.setattr(requests.LMCacheConnectorV1Dynamic, "__init__", stock)

    def start(configuration: Configuration) -> Any:
        monkeypatch.setattr(utils, "_config_instance", None)
        vllm_config: Any = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_connector_extra_config=dict(configuration.connector),
                kv_load_failure_policy="fail",
                engine_id="engine",
            ),
            cache_config=SimpleNamespace(block_size=configuration.block),
            parallel_config=SimpleNamespace(world_size=1, rank=0),
        )
        with pytest.raises(ReachedStartError):
            connector.RBLNLMCacheConnectorV1(vllm_config, KVConnectorRole.SCHEDULER)
        return utils._config_instance

    return start


def test_the_same_verdict_and_the_same_settings(
    place: Callable[[Configuration], None],
    start_engine: Callable[[Configuration], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused = 0
    for seed in range(CONFIGURATIONS):
        configuration = generated(seed)
        place(configuration)
        facts = examine(
            os.environ, IN_PROCESS, configuration.connector, configuration.block
        )
        results = [
            check_settings(facts),
            check_chunk(facts, None, False, configuration.block),
        ]
        problems = [p for p in facts["problems"] if not p["harmless"]]
        assert any(r.status == FAIL for r in results) == bool(problems), seed
        for result in results:
            assert SECRET not in repr(result), (seed, result)
        try:
            config = start_engine(configuration)
        except ValueError as refusal:
            refused += 1
            lines = str(refusal).splitlines()
            wanted = [
                f"{p['found']}, wanted {p['wanted']}; {p['fix']}" for p in problems
            ]
            assert lines == wanted, seed
            assert SECRET not in str(refusal), seed
            for problem in problems:
                said = " ".join(f"{r.found} {r.wanted} {r.fix}" for r in results)
                assert problem["found"] in said, (seed, problem)
            continue
        assert not problems, (seed, configuration, problems)
        accepted(seed, configuration, facts, config)
    # Both kinds are there, or nothing was compared.
    assert 60 <= refused <= CONFIGURATIONS - 60


def accepted(
    seed: int, configuration: Configuration, facts: dict[str, Any], config: Any
) -> None:
    """LMCache has the values that the table promised."""
    settings, _ = all_settings(os.environ, configuration.connector, configuration.block)
    for name in table.definitions():
        if name in ("extra_config", "lookup_server_worker_ids", "lmcache_instance_id"):
            continue
        assert getattr(config, name) == settings.values[name], (seed, name)
    assert config.extra_config == {"save_only_first_rank": False} | settings.extra
    assert facts["chunk_size"] == config.chunk_size


@pytest.mark.parametrize(
    "extra", [{}, {"lmcache.extra_config": {"rds_buffer_size": 64}}]
)
def test_what_lmcache_applies_again_keeps_every_ranks_own_chunks(
    extra: dict[str, Any],
    place: Callable[[Configuration], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place(Configuration())
    monkeypatch.setattr(utils, "_config_instance", None)
    vllm_config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        parallel_config=SimpleNamespace(world_size=2),
    )
    config = service.engine_config(vllm_config)
    impl = in_process("integration.vllm.vllm_v1_adapter").LMCacheConnectorV1Impl
    implementation: Any = impl.__new__(impl)
    implementation._apply_extra_config(config, vllm_config)
    assert config.extra_config["save_only_first_rank"] is False
    assert ("rds_buffer_size" in config.extra_config) == bool(extra)
