# SPDX-License-Identifier: Apache-2.0
"""Settings in their places: what is refused, in which words, and what is only said."""

# Standard
from pathlib import Path
from typing import Any
import json
import os

# Third Party
import pytest

# First Party
from lmcache.v1.config import LMCacheEngineConfig
from lmcache_rbln.settings import (
    examine,
    fitting_chunk_size,
    require,
    require_parsed,
)
from lmcache_rbln.settings.check import hash_seed_problem
from lmcache_rbln.settings.places import Problem

BLOCK = 128
SEED = {"PYTHONHASHSEED": "0"}
RDS = {
    "storage_plugin.RDSBackend.module_path": "lmcache_rbln.storage_plugin.rds_backend",
    "storage_plugin.RDSBackend.class_name": "RDSBackend",
}
RDS_VARIABLES = {
    "LMCACHE_STORAGE_PLUGINS": "RDSBackend",
    "LMCACHE_LOCAL_CPU": "False",
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "0",
    "LMCACHE_EXTRA_CONFIG": json.dumps(RDS),
}
SECRET = "hunter2-Zx9"


def problems(
    environment: dict[str, str] | None = None, connector: dict[str, Any] | None = None
) -> list[Problem]:
    return examine(environment or {}, connector or {}, BLOCK)[1]


def with_rds(**change: Any) -> dict[str, str]:
    return RDS_VARIABLES | {"LMCACHE_EXTRA_CONFIG": json.dumps(RDS | change)}


def extra(**entries: Any) -> dict[str, str]:
    return {"LMCACHE_EXTRA_CONFIG": json.dumps(entries)}


def test_nothing_set_and_the_documented_settings_are_well() -> None:
    assert not problems()
    assert not problems(
        {
            "LMCACHE_LOCAL_CPU": "True",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": "5.0",
            "LMCACHE_CHUNK_SIZE": "1024",
            "LMCACHE_USE_LAYERWISE": "False",
            "LMCACHE_DEVICE_BACKEND": "rbln",
            "LMCACHE_LOG_LEVEL": "DEBUG",
            "LMCACHE_EC_CHUNK_SIZE": "256",
        },
        {
            "lmcache_rbln.allow_degraded": True,
            "skip_last_n_tokens": 0,
            "discard_partial_chunks": True,
            "other": 1,
        },
    )
    assert not problems(with_rds(rds_buffer_size=64))


#: Environment, kv_connector_extra_config, setting, what is said.
REFUSED: list[tuple[dict[str, str], dict[str, Any], str, str]] = [
    (
        {"LMCACHE_CHUNK_SIZE": "abc"},
        {},
        "chunk_size",
        "LMCACHE_CHUNK_SIZE is 'abc', wanted a whole number .*; "
        "set LMCACHE_CHUNK_SIZE to 256",
    ),
    (
        {"LMCACHE_MAX_LOCAL_CPU_SIZE": "5368709120"},
        {},
        "max_local_cpu_size",
        "wanted a number from 0 to 65536 GiB; set LMCACHE_MAX_LOCAL_CPU_SIZE to 5.0",
    ),
    ({"LMCACHE_MAX_LOCAL_CPU_SIZE": "-1"}, {}, "max_local_cpu_size", "is '-1', wanted"),
    ({"LMCACHE_MAX_LOCAL_CPU_SIZE": "0"}, {}, "max_local_cpu_size", "SIZE to 5.0"),
    ({"LMCACHE_LOCAL_CPU": "False"}, {}, "local_cpu", "no storage tier is on, .*"),
    (
        {"LMCACHE_LOCAL_CPU": "False", "LMCACHE_LOCAL_DISK": "/tmp/x"},
        {},
        "max_local_disk_size",
        "LMCACHE_LOCAL_DISK is set and max_local_disk_size is 0",
    ),
    (
        {"LMCACHE_USE_LAYERWISE": "True"},
        {},
        "use_layerwise",
        "layer-wise transfer is not supported on RBLN, wanted use_layerwise off; "
        "unset LMCACHE_USE_LAYERWISE",
    ),
    ({"LMCACHE_GDS_PATH": ""}, {}, "gds_path", "unset LMCACHE_GDS_PATH"),
    ({}, {"lmcache.min_retrieve_tokens": 5}, "min_retrieve_tokens", "request resumes"),
    ({"LMCACHE_REMOTE_URL": ""}, {}, "remote_url", "unset LMCACHE_REMOTE_URL"),
    ({"LMCACHE_NUMA_MODE": "None"}, {}, "numa_mode", "auto or manual"),
    (
        extra(save_only_first_rank="false"),
        {},
        "save_only_first_rank",
        "is 'false', wanted true or false, without quotes; .* take "
        "save_only_first_rank out of LMCACHE_EXTRA_CONFIG",
    ),
    (
        extra(save_only_first_rank=True),
        {},
        "save_only_first_rank",
        "is not supported on RBLN, .*; take save_only_first_rank out of LMCACHE_EXTRA",
    ),
    (
        {},
        {"lmcache.extra_config": {"audit_backend_enabled": "false"}},
        "audit_backend_enabled",
        "is 'false', wanted true or false, without quotes",
    ),
    (
        extra(remote_enable_mla_worker_id_as0="no"),
        {},
        "remote_enable_mla_worker_id_as0",
        "is 'no', wanted true or false, without quotes",
    ),
    ({"LMCACHE_PIN_TIMEOUT_SEC": "0"}, {}, "pin_timeout_sec", "number from 1 to"),
    ({}, {"lmcache.pin_check_interval_sec": -5}, "pin_check_interval_sec", "is -5"),
    ({}, {"skip_last_n_tokens": "64"}, "skip_last_n_tokens", "is '64', wanted a whole"),
    ({}, {"skip_last_n_tokens": -3}, "skip_last_n_tokens", "a whole number from 0"),
    ({}, {"skip_last_n_tokens": 1.5}, "skip_last_n_tokens", "a whole number from 0"),
    ({}, {"skip_last_n_tokens": True}, "skip_last_n_tokens", "a whole number from 0"),
    (
        {},
        {"discard_partial_chunks": "false"},
        "discard_partial_chunks",
        "is 'false', wanted true or false, without quotes",
    ),
    (
        {},
        {"lmcache.validate": 1},
        "lmcache.validate",
        "would replace a part of LMCache, .*; unset lmcache.validate in kv_connector",
    ),
    ({}, {"lmcache._user_set_keys": 1}, "lmcache._user_set_keys", "would replace"),
    (
        {},
        {"remote_storage_plugin.x.module_path": "a"},
        "remote_storage_plugin.x.module_path",
        "has no effect, .*; move it to LMCACHE_EXTRA_CONFIG",
    ),
    (
        {},
        {"audit_backend_enabled": True},
        "audit_backend_enabled",
        "has no effect, .*; move it to LMCACHE_EXTRA_CONFIG",
    ),
    (
        {"LMCACHE_CHUNK_SIZE": "200"},
        {},
        "chunk_size, block_size",
        "LMCache's chunk size is 200 tokens, wanted a multiple of vLLM's block size "
        "128; set LMCACHE_CHUNK_SIZE to 256",
    ),
    (
        {"LMCACHE_CHUNK_SIZE": "256"},
        {"lmcache.chunk_size": 130},
        "chunk_size, block_size",
        "set lmcache.chunk_size in kv_connector_extra_config to 256",
    ),
    (
        {},
        {"lmcache.max_tokens_per_load": 100},
        "lmcache.max_tokens_per_load",
        "wanted 0 .*, or a chunk of 256 tokens or more",
    ),
    (
        {},
        {"lmcache.max_tokens_per_load": "512"},
        "lmcache.max_tokens_per_load",
        "is '512', wanted a whole number",
    ),
    (
        {"LMCACHE_MAX_TOKENS_PER_LOAD": "1024"},
        {},
        "LMCACHE_MAX_TOKENS_PER_LOAD",
        "rename it to lmcache.max_tokens_per_load in kv_connector_extra_config",
    ),
    ({"LMCACHE_CHUNKSIZE": "2"}, {}, "LMCACHE_CHUNKSIZE", "it to LMCACHE_CHUNK_SIZE"),
    (
        {"LMCACHE_RBLN_STAGING_MB": "64"},
        {},
        "LMCACHE_RBLN_STAGING_MB",
        "rename it to LMCACHE_RBLN_STAGING_MIB",
    ),
    (
        {},
        {"lmcache.chunk_sizes": 256},
        "lmcache.chunk_sizes in kv_connector_extra_config",
        "rename it to lmcache.chunk_size",
    ),
    ({}, {"chunk_size": 256}, "chunk_size", "move it to lmcache.chunk_size"),
    (
        RDS_VARIABLES,
        {"rds_buffer_size": 64},
        "rds_buffer_size",
        "has no effect, .*; move it to LMCACHE_EXTRA_CONFIG",
    ),
    (
        extra(**{"lmcache.chunk_size": 128}),
        {},
        "lmcache.chunk_size",
        "move it to kv_connector_extra_config",
    ),
    (
        with_rds(rds_buffer_size="2048"),
        {},
        "rds_buffer_size",
        "rds_buffer_size must be a whole number, got '2048', .*; "
        "correct LMCACHE_EXTRA_CONFIG",
    ),
    (with_rds(rds_bufer_size=64), {}, "rds_bufer_size", "did you mean rds_buffer_size"),
    (
        RDS_VARIABLES | {"LMCACHE_LOCAL_CPU": "True"},
        {},
        "local_cpu",
        "set LMCACHE_LOCAL_CPU to False and LMCACHE_MAX_LOCAL_CPU_SIZE to 0",
    ),
    (
        RDS_VARIABLES | {"LMCACHE_MAX_LOCAL_CPU_SIZE": "5"},
        {},
        "max_local_cpu_size",
        "RDSBackend works without LMCache's CPU tier",
    ),
    (
        with_rds(**{"storage_plugin.RDSBackend.class_name": "RDSBackends"}),
        {},
        "storage_plugin.RDSBackend.class_name",
        "'RDSBackends' of '.*rds_backend' can't be loaded",
    ),
    (
        {"LMCACHE_STORAGE_PLUGINS": "P"}
        | extra(**{"storage_plugin.P.module_path": "q"}),
        {},
        "storage_plugin.P.class_name",
        "storage plugin P: .*no module 'q'",
    ),
    (
        {},
        {"lmcache_rbln.allow_degraded": "perhaps"},
        "lmcache_rbln.allow_degraded",
        "must be true or false",
    ),
    ({"LMCACHE_DEVICE_BACKEND": "cuda"}, {}, "LMCACHE_DEVICE_BACKEND", "wanted rbln"),
    (
        {"LMCACHE_ENABLE_CONTROLLER": "True"},
        {},
        "LMCache",
        "controller_pull_url is req",
    ),
    (
        {"LMCACHE_FORCE_SKIP_SAVE": "False"},
        {},
        "LMCACHE_FORCE_SKIP_SAVE",
        "or unset it",
    ),
    ({"LMCACHE_CONFIG_FILE": "/no/file"}, {}, "LMCACHE_CONFIG_FILE", "No such file"),
]


@pytest.mark.parametrize(("environment", "connector", "setting", "said"), REFUSED)
def test_what_is_refused_names_setting_value_and_fix(
    environment: dict[str, str], connector: dict[str, Any], setting: str, said: str
) -> None:
    (problem,) = problems(environment, connector)
    assert problem.setting == setting
    assert not problem.harmless
    with pytest.raises(ValueError, match=said) as refusal:
        require(SEED | environment, connector, BLOCK)
    assert "\n" not in str(refusal.value)


def test_every_problem_is_a_line_and_harmless_ones_are_not() -> None:
    environment = {
        "LMCACHE_ZZ": "1",
        "LMCACHE_CHUNK_SIZE": "k",
        "LMCACHE_LOCAL_CPU": "y",
    }
    with pytest.raises(ValueError) as refusal:
        require(SEED | environment, {}, BLOCK)
    lines = str(refusal.value).splitlines()
    assert len(lines) == 2
    assert "LMCACHE_CHUNK_SIZE is 'k'" in lines[0]
    assert "LMCACHE_LOCAL_CPU is 'y', wanted true or false" in lines[1]


@pytest.mark.parametrize(
    ("environment", "connector", "said"),
    [
        ({"LMCACHE_ZZZZZZ": "1"}, {}, "unset LMCACHE_ZZZZZZ, unless another program"),
        # Other programs', and some of LMCache's own documents and tools.
        ({"LMCACHE_DISK_PATH": "1"}, {}, "unless another program reads it"),
        ({"LMCACHE_ENABLE_NIXL": "1"}, {}, "unless another program reads it"),
        ({"LMCACHE_MAX_LOCAL_CPU": "1"}, {}, "unless another program reads it"),
        ({}, {"lmcache.nothing_like_it": 1}, "unset lmcache.nothing_like_it in"),
        # A variable alone.
        ({}, {"lmcache.config_file": "x"}, "unset lmcache.config_file in"),
        (extra(rds_capacity=5), {}, "has no effect"),
    ],
)
def test_what_has_no_effect_is_said(
    environment: dict[str, str], connector: dict[str, Any], said: str
) -> None:
    (problem,) = problems(environment, connector)
    assert problem.harmless
    assert said in str(problem)
    require(SEED | environment, connector, BLOCK)


def test_variables_that_kubernetes_sets_for_services_are_no_settings() -> None:
    assert not problems(
        {
            "LMCACHE_PORT": "tcp://10.0.0.7:6555",
            "LMCACHE_MP_PORT": "tcp://10.0.0.7:6555",
            "LMCACHE_MP_PORT_6555_TCP": "tcp://10.0.0.7:6555",
            "LMCACHE_MP_PORT_6555_TCP_ADDR": "10.0.0.7",
            "LMCACHE_SERVICE_HOST": "10.0.0.7",
            "LMCACHE_SERVICE_PORT_HTTP": "8080",
        }
    )
    assert problems({"LMCACHE_MP_PORT": "tcp"})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("LMCACHE_HIT_MISS_RATIO", ""),
        ("LMCACHE_LOCAL_DISK", ""),
        ("LMCACHE_LMCACHE_WORKER_PORTS", "null"),
        ("LMCACHE_EXTRA_CONFIG", "None"),
        ("LMCACHE_PD_ALLOCATION_TIMEOUT_SEC", "inf"),
    ],
)
def test_variables_that_say_nothing_are_none_where_lmcache_takes_them_so(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    name = variable.removeprefix("LMCACHE_").lower()
    monkeypatch.setenv(variable, value)
    settings, found = examine({variable: value}, {}, BLOCK)
    assert not found
    assert getattr(LMCacheEngineConfig.from_env(), name) == settings.values[name]


def test_the_file_counts_below_the_variables_and_the_connector(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(
        "chunk_size: 130\nmax_local_cpu_size: 2\nec_chunk_size: 1\npriority_limit: 5\n"
    )
    where = {"LMCACHE_CONFIG_FILE": str(file), "LMCACHE_PRIORITY_LIMIT": ""}
    settings, (problem,) = examine(where, {}, BLOCK)
    assert f"set chunk_size in {file} to 256" in problem.fix
    assert settings.values["max_local_cpu_size"] == 2.0
    where["LMCACHE_CHUNK_SIZE"] = "256"
    settings, found = examine(where, {}, BLOCK)
    assert not found
    for variable, value in where.items():
        monkeypatch.setenv(variable, value)
    config = LMCacheEngineConfig.from_file(str(file))
    config.update_config_from_env()
    for name in ("chunk_size", "max_local_cpu_size", "priority_limit"):
        assert settings.values[name] == getattr(config, name)
    settings, _ = examine(where, {"lmcache.chunk_size": 384}, BLOCK)
    assert settings.values["chunk_size"] == 384


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{SECRET}: [", "can't be parsed as YAML at line"),
        (f"a: !{SECRET} b", "can't be parsed as YAML"),
        ("- 1", "holds no mapping"),
        ("chunk_sise: 1", "rename it to chunk_size"),
        ("local_cpu: 'yes'", "local_cpu in .* is 'yes'"),
        ("chunk_size:", "chunk_size in .* is None"),
        ("chunk_size: 2026-12-01", "chunk_size in .*a whole number"),
        (f"extra_config: '{{{SECRET}'", "a JSON object"),
        ("\0", "can't be parsed"),
        ("[" * 20000, "can't be parsed"),
    ],
    ids=lambda text: repr(text[:20]),
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, found: str) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=found) as refusal:
        require(SEED | {"LMCACHE_CONFIG_FILE": str(file)}, {}, BLOCK)
    assert SECRET not in str(refusal.value)


@pytest.mark.parametrize("text", ["local_device: cpu", "1: 2", f"{SECRET} {SECRET}: 2"])
def test_an_unknown_name_in_a_file_is_only_said(tmp_path: Path, text: str) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(text)
    (problem,) = problems({"LMCACHE_CONFIG_FILE": str(file)})
    assert problem.harmless
    assert "is not a name that LMCache reads" in problem.found
    assert SECRET not in repr(problem)


def test_nothing_in_a_file_where_lmcache_takes_it(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(
        "remote_url: null\nnuma_mode: null\npd_allocation_timeout_sec: .inf"
    )
    settings, found = examine({"LMCACHE_CONFIG_FILE": str(file)}, {}, BLOCK)
    assert not found
    config = LMCacheEngineConfig.from_file(str(file))
    for name in settings.where:
        assert getattr(config, name) == settings.values[name]


def test_a_file_that_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ""):
        with pytest.raises(ValueError, match="not a file"):
            require(SEED | {"LMCACHE_CONFIG_FILE": str(tmp_path / name)}, {}, BLOCK)


@pytest.mark.parametrize("text", [f'{{"password": "{SECRET}",}}', f"'{SECRET}"])
def test_malformed_json_is_not_shown(text: str) -> None:
    for environment, connector in (
        ({"LMCACHE_EXTRA_CONFIG": text}, {}),
        ({}, {"lmcache.extra_config": text}),
    ):
        (problem,) = problems(environment, connector)
        assert SECRET not in repr(problem)
        assert "a JSON object; " in problem.wanted


def test_what_lmcache_has_in_the_end_is_checked_too() -> None:
    settings = require(SEED, {}, BLOCK)
    config = LMCacheEngineConfig.from_defaults()
    require_parsed(config, settings, BLOCK)
    # As a configuration server or an earlier engine of the process leaves it.
    config.chunk_size = 130
    with pytest.raises(ValueError, match="chunk size is 130 .* configuration server"):
        require_parsed(config, settings, BLOCK)


@pytest.mark.parametrize(
    ("chunk", "block", "fitting"),
    [(200, 128, 256), (64, 128, 128), (256, 128, 256), (0, 16, 16)],
)
def test_the_proposed_chunk_size_is_the_next_that_fits(
    chunk: int, block: int, fitting: int
) -> None:
    assert fitting_chunk_size(chunk, block) == fitting


@pytest.mark.parametrize(
    ("seed", "is_well"),
    [(seed, False) for seed in (None, "", " ", "random", "RANDOM", "-1", "4294967296")]
    + [("0", True), ("4294967295", True)],
)
def test_a_hash_seed_that_differs_between_processes(
    seed: str | None, is_well: bool
) -> None:
    problem = hash_seed_problem({} if seed is None else {"PYTHONHASHSEED": seed})
    assert (problem is None) is is_well
    if problem is not None:
        environment = {} if seed is None else {"PYTHONHASHSEED": seed}
        with pytest.raises(ValueError, match="; export PYTHONHASHSEED=0$"):
            require(environment, {}, BLOCK)
