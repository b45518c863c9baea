# SPDX-License-Identifier: Apache-2.0
"""Settings in their places: what is refused, in which words, and what is only said."""

# Future
from __future__ import annotations

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
    Problem,
    VllmFacts,
    examine,
    fitting_chunk_size,
    hash_seed_problem,
    require,
    require_parsed,
)
from lmcache_rbln.settings.check import examine_server

FACTS = VllmFacts(128, 1)
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


def problems(
    environment: dict[str, str] | None = None, connector: dict[str, Any] | None = None
) -> list[Problem]:
    return examine(environment or {}, connector or {}, FACTS)[1]


def with_rds(**change: Any) -> dict[str, str]:
    return RDS_VARIABLES | {"LMCACHE_EXTRA_CONFIG": json.dumps(RDS | change)}


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
        {"lmcache_rbln.allow_degraded": True, "other": 1},
    )
    assert not problems(with_rds(rds_buffer_size=64))


REFUSED: list[tuple[dict[str, str], dict[str, Any], str, str]] = [
    # environment, kv_connector_extra_config, setting, what is said
    (
        {"LMCACHE_CHUNK_SIZE": "abc"},
        {},
        "chunk_size",
        "LMCACHE_CHUNK_SIZE is 'abc', wanted a whole number .*; "
        "set LMCACHE_CHUNK_SIZE=256",
    ),
    (
        {"LMCACHE_MAX_LOCAL_CPU_SIZE": "five"},
        {},
        "max_local_cpu_size",
        "LMCACHE_MAX_LOCAL_CPU_SIZE is 'five', wanted a number .*; "
        "set LMCACHE_MAX_LOCAL_CPU_SIZE=5.0",
    ),
    (
        {"LMCACHE_MAX_LOCAL_CPU_SIZE": "-1"},
        {},
        "max_local_cpu_size",
        "LMCACHE_MAX_LOCAL_CPU_SIZE is -1.0, wanted a number from 0 to 65536 GiB",
    ),
    (
        {"LMCACHE_MAX_LOCAL_CPU_SIZE": "5368709120"},
        {},
        "max_local_cpu_size",
        "wanted a number from 0 to 65536 GiB",
    ),
    (
        {"LMCACHE_MAX_LOCAL_CPU_SIZE": "0"},
        {},
        "max_local_cpu_size",
        "set LMCACHE_MAX_LOCAL_CPU_SIZE=5.0",
    ),
    (
        {"LMCACHE_LOCAL_CPU": "False"},
        {},
        "local_cpu",
        "no storage tier is on, .*; set LMCACHE_LOCAL_CPU=True",
    ),
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
        "set LMCACHE_USE_LAYERWISE=False",
    ),
    (
        {"LMCACHE_ENABLE_SCHEDULER_BYPASS_LOOKUP": "True"},
        {},
        "enable_scheduler_bypass_lookup",
        "set LMCACHE_ENABLE_SCHEDULER_BYPASS_LOOKUP=False",
    ),
    ({"LMCACHE_GDS_PATH": "/mnt"}, {}, "gds_path", "unset LMCACHE_GDS_PATH"),
    (
        {"LMCACHE_EXTRA_CONFIG": '{"save_only_first_rank": true}'},
        {},
        "save_only_first_rank",
        "take save_only_first_rank out of LMCACHE_EXTRA_CONFIG",
    ),
    (
        {"LMCACHE_EXTRA_CONFIG": '{"save_only_first_rank": "false"}'},
        {},
        "save_only_first_rank",
        "is 'false', wanted true or false",
    ),
    (
        {"LMCACHE_CHUNK_SIZE": "200"},
        {},
        "chunk_size, block_size",
        "LMCache's chunk size is 200 tokens, wanted a multiple of vLLM's block size "
        "128; set LMCACHE_CHUNK_SIZE=256",
    ),
    (
        {"LMCACHE_CHUNK_SIZE": "256"},
        {"lmcache.chunk_size": 130},
        "chunk_size, block_size",
        "set lmcache.chunk_size to 256 in kv_connector_extra_config, which overrides "
        "the variable and the file",
    ),
    (
        {},
        {"lmcache.max_tokens_per_load": 100},
        "lmcache.max_tokens_per_load",
        "wanted 0 .*, or a chunk of 256 tokens or more",
    ),
    (
        {"LMCACHE_MAX_TOKENS_PER_LOAD": "1024"},
        {},
        "LMCACHE_MAX_TOKENS_PER_LOAD",
        "wanted lmcache.max_tokens_per_load in kv_connector_extra_config",
    ),
    (
        {"LMCACHE_CHUNKSIZE": "256"},
        {},
        "LMCACHE_CHUNKSIZE",
        "rename it to LMCACHE_CHUNK_SIZE",
    ),
    (
        {},
        {"lmcache.chunk_sizes": 256},
        "lmcache.chunk_sizes",
        "rename it to lmcache.chunk_size",
    ),
    ({}, {"lmcache.to_dict": 1}, "lmcache.to_dict", "would replace a part of LMCache"),
    ({}, {"lmcache._user_set_keys": 1}, "lmcache._user_set_keys", "take .* out of"),
    (
        {"LMCACHE_CONFIG_FLE": "/etc/lmcache.yaml"},
        {},
        "LMCACHE_CONFIG_FLE",
        "rename it to LMCACHE_CONFIG_FILE",
    ),
    (
        {"LMCACHE_MIN_RETRIEVE_TOKENS": "512"},
        {},
        "min_retrieve_tokens",
        "a preempted request resumes, is not supported on RBLN, .*; "
        "unset LMCACHE_MIN_RETRIEVE_TOKENS",
    ),
    (
        {},
        {"lmcache.min_retrieve_tokens": -1},
        "min_retrieve_tokens",
        "take lmcache.min_retrieve_tokens out of kv_connector_extra_config",
    ),
    (
        {"LMCACHE_EXTERNAL_LOOKUP_CLIENT": "mooncakestore://h:1"},
        {},
        "external_lookup_client",
        "keys hold no tenant, is not supported on RBLN, .*; "
        "unset LMCACHE_EXTERNAL_LOOKUP_CLIENT",
    ),
    (
        {"LMCACHE_EXTERNAL_LOOKUP_CLIENT": "", "LMCACHE_ENABLE_ASYNC_LOADING": "True"},
        {},
        "external_lookup_client",
        "unset LMCACHE_EXTERNAL_LOOKUP_CLIENT",
    ),
    (
        {
            "LMCACHE_EXTRA_CONFIG": '{"enable_nixl_storage": true, '
            '"nixl_presence_cache": true}'
        },
        {},
        "enable_nixl_storage",
        "NIXL storage is not supported on RBLN",
    ),
    (
        {"LMCACHE_REMOTE_URL": "redis://h:1"},
        {"lmcache.remote_serde": None},
        "remote_serde",
        "remote_serde in kv_connector_extra_config is None, .* naive or kivi",
    ),
    ({}, {"chunk_size": 256}, "chunk_size", "rename it to lmcache.chunk_size"),
    (
        RDS_VARIABLES,
        {"rds_buffer_size": 64},
        "rds_buffer_size",
        "move rds_buffer_size into LMCACHE_EXTRA_CONFIG",
    ),
    (
        {"LMCACHE_EXTRA_CONFIG": '{"lmcache.chunk_size": 128}'},
        {},
        "lmcache.chunk_size",
        "move it to kv_connector_extra_config",
    ),
    (
        with_rds(rds_buffer_size="2048"),
        {},
        "rds_buffer_size",
        "rds_buffer_size in LMCACHE_EXTRA_CONFIG is '2048', wanted a whole number",
    ),
    (
        with_rds(rds_bufer_size=64),
        {},
        "rds_bufer_size",
        "did you mean rds_buffer_size",
    ),
    (
        RDS_VARIABLES | {"LMCACHE_LOCAL_CPU": "True"},
        {},
        "local_cpu",
        "set LMCACHE_LOCAL_CPU=False and set LMCACHE_MAX_LOCAL_CPU_SIZE=0",
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
        "no class 'RDSBackends' in 'lmcache_rbln.storage_plugin.rds_backend'",
    ),
    (
        with_rds(**{"storage_plugin.RDSBackend.module_path": "no.such"})
        | {"LMCACHE_MAX_LOCAL_CPU_SIZE": "5"},
        {},
        "storage_plugin.RDSBackend.module_path",
        "no module 'no.such'",
    ),
    (
        {"LMCACHE_STORAGE_PLUGINS": "P"},
        {},
        "storage_plugin.P.module_path",
        "storage plugin P: no module_path",
    ),
    (
        {},
        {"lmcache_rbln.allow_degraded": "perhaps"},
        "lmcache_rbln.allow_degraded",
        "wants true or false",
    ),
    ({"LMCACHE_DEVICE_BACKEND": "cuda"}, {}, "LMCACHE_DEVICE_BACKEND", "wanted rbln"),
    (
        {"LMCACHE_ENABLE_CONTROLLER": "True"},
        {},
        "LMCache",
        "controller_pull_url is required",
    ),
    (
        {},
        {"lmcache.lookup_server_worker_ids": [1]},
        "lookup_server_worker_ids",
        "wanted ranks from 0 to 0",
    ),
    (
        {"LMCACHE_FORCE_SKIP_SAVE": "False"},
        {},
        "LMCACHE_FORCE_SKIP_SAVE",
        "any value keeps LMCache from storing, .*; unset LMCACHE_FORCE_SKIP_SAVE",
    ),
    (
        {},
        {"discard_partial_chunks": "false"},
        "discard_partial_chunks",
        "is 'false', wanted true or false",
    ),
    ({"LMCACHE_REMOTE_URL": ""}, {}, "remote_url", "unset LMCACHE_REMOTE_URL"),
    (
        {"LMCACHE_CONFIG_FILE": "/no/such/file"},
        {},
        "LMCACHE_CONFIG_FILE",
        "No such file",
    ),
]


@pytest.mark.parametrize(("environment", "connector", "setting", "said"), REFUSED)
def test_what_is_refused_names_setting_value_and_fix(
    environment: dict[str, str], connector: dict[str, Any], setting: str, said: str
) -> None:
    (problem,) = problems(environment, connector)
    assert problem.setting == setting
    assert not problem.harmless
    with pytest.raises(ValueError, match=said) as refusal:
        require(environment, connector, FACTS)
    assert "\n" not in str(refusal.value)


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
    "name",
    [
        # Other programs', and some of LMCache's own documents and tools.
        *("ENABLED", "ENABLE", "DISK_PATH", "RPC_PORT", "SERVER", "APP", "LOG"),
        *("CONTROLLER", "ROCM_FORCE_BATCH_MEMCPY", "CONFIG", "EXTRA", "LOCAL"),
        *("MAX_LOCAL_CPU", "MAX_LOCAL_DISK", "PEER_INIT_PORTS", "MP_COORDINATOR_"),
        *("HOST", "PORT", "IMAGE", "HOME", "CHUNK", "REMOTE", "NIXL_PEER_HOST"),
        *("USE_EXPERIMENTAL", "LOCAL_DEVICE", "ENABLE_NIXL", "INSTANCE_ID"),
    ],
)
def test_variables_of_other_programs_do_not_stop_the_start(name: str) -> None:
    (problem,) = problems({f"LMCACHE_{name}": "1"})
    assert problem.harmless
    assert "unless another program reads it" in problem.fix


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("LMCACHE_HIT_MISS_RATIO", ""),
        ("LMCACHE_PRIORITY_LIMIT", "None"),
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
    settings, found = examine({variable: value}, {}, FACTS)
    assert not found
    assert getattr(LMCacheEngineConfig.from_env(), name) == settings.values[name]


def test_a_variable_that_says_nothing_leaves_the_file_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("priority_limit: 5\nextra_config: {a: 1}\n")
    environment = {
        "LMCACHE_CONFIG_FILE": str(file),
        "LMCACHE_PRIORITY_LIMIT": "",
        "LMCACHE_EXTRA_CONFIG": "None",
    }
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    settings, found = examine(environment, {}, FACTS)
    assert not found
    config = LMCacheEngineConfig.from_file(str(file))
    config.update_config_from_env()
    assert settings.values["priority_limit"] == config.priority_limit == 5
    assert settings.extra == config.extra_config == {"a": 1}


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("LMCACHE_NUMA_MODE", "None"),
        ("LMCACHE_GDS_PATH", ""),
        ("LMCACHE_MAX_LOCAL_CPU_SIZE", ""),
        ("LMCACHE_MAX_LOCAL_CPU_SIZE", "inf"),
        ("LMCACHE_PD_ALLOCATION_TIMEOUT_SEC", "-inf"),
    ],
)
def test_others_are_refused_with_advice_that_is_accepted(
    variable: str, value: str
) -> None:
    (problem,) = problems({variable: value})
    assert not problem.harmless
    if "unset" in problem.fix:
        assert problem.fix.endswith(f"unset {variable}")
        return
    advised = problem.fix.removesuffix(", for example").removeprefix("set ")
    assert not problems(dict([advised.split("=")]))


def test_every_problem_is_a_line_and_harmless_ones_are_not() -> None:
    environment = {
        "LMCACHE_ZZZZZZ": "1",
        "LMCACHE_CHUNK_SIZE": "k",
        "LMCACHE_LOCAL_CPU": "yes",
    }
    with pytest.raises(ValueError) as refusal:
        require(environment, {}, FACTS)
    lines = str(refusal.value).splitlines()
    assert len(lines) == 2
    assert "LMCACHE_CHUNK_SIZE is 'k'" in lines[0]
    assert "LMCACHE_LOCAL_CPU is 'yes', wanted true or false" in lines[1]


@pytest.mark.parametrize(
    ("environment", "connector", "said"),
    [
        ({"LMCACHE_ZZZZZZ": "1"}, {}, "unset LMCACHE_ZZZZZZ, unless another"),
        ({}, {"lmcache.nothing_like_it": 1}, "take lmcache.nothing_like_it out of"),
        ({}, {"lmcache.mp.port": 5555}, "for LMCacheMPConnector"),
        ({"LMCACHE_EXTRA_CONFIG": '{"rds_capacity": 5}'}, {}, "has no effect"),
        (
            {"LMCACHE_EXTRA_CONFIG": '{"a": 1, "b": 2}'},
            {"lmcache.extra_config": {"b": 3}},
            "replaces LMCACHE_EXTRA_CONFIG as a whole, so there a has no effect",
        ),
    ],
)
def test_what_has_no_effect_is_said(
    environment: dict[str, str], connector: dict[str, Any], said: str
) -> None:
    (problem,) = problems(environment, connector)
    assert problem.harmless
    assert said in str(problem)
    require(environment, connector, FACTS)


def test_the_file_counts_below_the_variables_and_the_connector(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 130\nmax_local_cpu_size: 2\nec_chunk_size: 1\n")
    where = {"LMCACHE_CONFIG_FILE": str(file)}
    settings, (problem,) = examine(where, {}, FACTS)
    assert f"set chunk_size to 256 in {file}" in problem.fix
    assert settings.values["max_local_cpu_size"] == 2.0
    settings, found = examine(where | {"LMCACHE_CHUNK_SIZE": "256"}, {}, FACTS)
    assert not found
    assert settings.values["chunk_size"] == 256
    settings, _ = examine(where, {"lmcache.chunk_size": 384}, FACTS)
    assert settings.values["chunk_size"] == 384


SECRET = "hunter2-Zx9"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a: [", "can't be parsed as YAML at line"),
        (f"{SECRET}: [", "can't be parsed as YAML"),
        (f"a: *{SECRET}", "can't be parsed as YAML"),
        (f"a: !{SECRET} b", "can't be parsed as YAML"),
        ("- 1", "holds a list"),
        ("1: 2", "has the entry 1"),
        ("? [a]\n: 2", "can't be parsed as YAML"),
        ("chunk_sise: 1", "rename it to chunk_size"),
        ("local_cpu: 'yes'", "local_cpu in .* is 'yes'"),
        ("chunk_size:", "chunk_size in .* is None"),
        ("chunk_size: 2026-12-01", "chunk_size in .*a whole number"),
        (f"extra_config: '{{{SECRET}'", "a JSON object"),
        ("\0", "can't be parsed"),
        ("[" * 20000, "can't be parsed"),
        ("x" * (1 << 21), "2097152 bytes"),
    ],
    ids=lambda text: repr(text[:20]),
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, found: str) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=found) as refusal:
        require({"LMCACHE_CONFIG_FILE": str(file)}, {}, FACTS)
    assert SECRET not in str(refusal.value)


@pytest.mark.parametrize(
    "text",
    [
        # Entries of files that LMCache 0.5.6 ships or documents.
        "local_device: cpu",
        "async_loading: true",
        "eic_instance_id: a",
        "eic_flag_file: /a",
        f"{SECRET} {SECRET}: 2",
    ],
)
def test_an_unknown_name_in_a_file_is_only_said(tmp_path: Path, text: str) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(text)
    _, (problem,) = examine({"LMCACHE_CONFIG_FILE": str(file)}, {}, FACTS)
    assert problem.harmless
    assert "is not a name that LMCache reads" in problem.found
    assert SECRET not in repr(problem)


@pytest.mark.parametrize(
    "text",
    [
        "remote_serde: null",
        "remote_url: null\nremote_serde: null\nlocal_disk: null",
        "numa_mode: null\npriority_limit: null\nextra_config: null",
        "pd_backend_mode: null\npd_allocation_timeout_sec: .inf",
    ],
)
def test_nothing_in_a_file_where_lmcache_takes_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(text)
    where = {"LMCACHE_CONFIG_FILE": str(file)}
    settings, found = examine(where, {}, FACTS)
    assert not found
    config = LMCacheEngineConfig.from_file(str(file))
    for name in settings.entries:
        assert getattr(config, name) == settings.values[name]


def test_a_file_that_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, found in (("pipe", "not a file"), ("", "not a file")):
        with pytest.raises(ValueError, match=found):
            require({"LMCACHE_CONFIG_FILE": str(tmp_path / name)}, {}, FACTS)


@pytest.mark.parametrize(
    "text", [f'{{"redis_password": "{SECRET}",}}', f"'{SECRET}", f'["{SECRET}"]']
)
def test_malformed_json_is_not_shown(text: str) -> None:
    for environment, connector in (
        ({"LMCACHE_EXTRA_CONFIG": text}, {}),
        ({}, {"lmcache.extra_config": text}),
    ):
        (problem,) = problems(environment, connector)
        assert SECRET not in repr(problem)
        assert "a JSON object" in problem.wanted


def test_what_lmcache_has_in_the_end_is_checked_too() -> None:
    settings = require({}, {}, FACTS)
    config = LMCacheEngineConfig.from_defaults()
    require_parsed(config, settings, FACTS)
    # As a configuration server or an earlier engine of the process leaves it.
    config.chunk_size = 130
    with pytest.raises(ValueError, match="chunk size is 130 .* configuration server"):
        require_parsed(config, settings, FACTS)


@pytest.mark.parametrize(
    ("chunk", "block", "fitting"),
    [(200, 128, 256), (64, 128, 128), (130, 128, 256), (256, 128, 256), (0, 16, 16)],
)
def test_the_proposed_chunk_size_is_the_next_that_fits(
    chunk: int, block: int, fitting: int
) -> None:
    assert fitting_chunk_size(chunk, block) == fitting


@pytest.mark.parametrize("seed", [None, "", " ", "random", "RANDOM", "abc", "-1"])
def test_a_hash_seed_that_differs_between_processes(seed: str | None) -> None:
    problem = hash_seed_problem({} if seed is None else {"PYTHONHASHSEED": seed})
    assert problem is not None
    assert problem.fix == "export PYTHONHASHSEED=0"
    assert hash_seed_problem({"PYTHONHASHSEED": "4294967295"}) is None
    assert hash_seed_problem({"PYTHONHASHSEED": "4294967296"}) is not None


@pytest.mark.parametrize(
    ("environment", "connector", "found"),
    [
        ({}, {"lmcache.mp.server_urls": 5}, "lmcache.mp.server_urls"),
        ({}, {"lmcache.mp.server_urls": {"a": SECRET}}, "lmcache.mp.server_urls"),
        ({}, {"lmcache.mp.server_urls": [5]}, "lmcache.mp.server_urls"),
        ({}, {"lmcache.mp.port": "many"}, "lmcache.mp.port"),
        ({}, {"lmcache.mp.port": 70000}, "lmcache.mp.port"),
        ({"LMCACHE_MP_TRANSFER_MODE": "lmcache_driven"}, {}, "MP_TRANSFER_MODE"),
    ],
)
def test_settings_of_the_connector_with_a_server(
    environment: dict[str, str], connector: dict[str, Any], found: str
) -> None:
    (problem,) = examine_server(environment, connector)
    assert found in problem.found
    assert SECRET not in repr(problem)


def test_the_connector_with_a_server_reads_no_settings_of_lmcache_in_process() -> None:
    (problem,) = examine_server(
        {"LMCACHE_CHUNK_SIZE": "k"},
        {"lmcache.mp.server_urls": "a:1,b:2", "lmcache.mp.port": "5555"},
    )
    assert problem.harmless
