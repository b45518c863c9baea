# SPDX-License-Identifier: Apache-2.0
"""The hash seed, and LMCache's settings as LMCache itself parses them."""

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
from lmcache_rbln.diagnose.lmcache_settings import (
    known_names,
    parse,
    without_secrets,
)
from lmcache_rbln.diagnose.result import Result, Status
from lmcache_rbln.diagnose.settings import check_hash_seed, check_settings


@pytest.mark.parametrize("value", [None, "", " ", "random"])
def test_a_hash_seed_that_differs_between_processes(value: str | None) -> None:
    environment = {} if value is None else {"PYTHONHASHSEED": value}
    result = check_hash_seed(environment)
    assert result.status is Status.FAIL
    assert result.fix == "export PYTHONHASHSEED=0"
    assert ("not set" if value is None else repr(value)) in result.found


@pytest.mark.parametrize("value", ["0", "4294967295"])
def test_a_fixed_hash_seed(value: str) -> None:
    result = check_hash_seed({"PYTHONHASHSEED": value})
    assert (result.status, result.found) == (Status.OK, f"PYTHONHASHSEED={value}")


class Settings:
    """Sets variables and checks what diagnose makes of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        for name in list(os.environ):
            if name.startswith("LMCACHE_"):
                monkeypatch.delenv(name)

    def check(self, connector: dict[str, Any] | None = None, **values: str) -> Result:
        for name, value in values.items():
            self._monkeypatch.setenv(name, value)
        return check_settings(parse(os.environ, connector or {}), os.environ)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    return Settings(monkeypatch)


def test_the_documented_settings_are_shown_as_parsed(settings: Settings) -> None:
    result = settings.check(
        LMCACHE_LOCAL_CPU="True",
        LMCACHE_MAX_LOCAL_CPU_SIZE="5.0",
        LMCACHE_CHUNK_SIZE="1024",
        LMCACHE_USE_LAYERWISE="False",
    )
    assert result.status is Status.OK, result
    assert result.details["values"] == {
        "chunk_size": 1024,
        "local_cpu": True,
        "max_local_cpu_size": 5.0,
        "use_layerwise": False,
    }
    assert "chunk_size=1024" in result.found


def test_defaults(settings: Settings) -> None:
    result = settings.check()
    assert (result.status, result.found) == (Status.OK, "LMCache's defaults")


BOOLEANS = ("True", "true", " TRUE ", "1", "False", "false", "0", "'true'")


@pytest.mark.parametrize("value", BOOLEANS)
def test_booleans_that_lmcache_reads_right(settings: Settings, value: str) -> None:
    result = settings.check(LMCACHE_LOCAL_CPU=value, LMCACHE_LOCAL_DISK="/tmp/x")
    assert result.status is Status.OK, result
    wanted = value.strip(" '").lower() in ("true", "1")
    assert result.details["values"]["local_cpu"] is wanted


@pytest.mark.parametrize("value", ["yes", "on", "no", "off", "Y", "", "2", "Flase"])
def test_booleans_that_lmcache_reads_as_false(settings: Settings, value: str) -> None:
    result = settings.check(LMCACHE_LOCAL_CPU=value)
    assert result.status is Status.FAIL
    assert "LMCACHE_LOCAL_CPU" in result.found
    assert "reads anything else as false" in result.wanted
    assert result.fix == "set LMCACHE_LOCAL_CPU to true or false"


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("LMCACHE_CHUNK_SIZE", "1k", "a whole number"),
        ("LMCACHE_CHUNK_SIZE", "256.0", "a whole number"),
        ("LMCACHE_CHUNK_SIZE", "", "a whole number"),
        ("LMCACHE_MAX_LOCAL_CPU_SIZE", "5GB", "a number"),
        ("LMCACHE_MAX_LOCAL_CPU_SIZE", "nan", "a finite number"),
        ("LMCACHE_EXTRA_CONFIG", "{'a': 1}", "a value that can be parsed"),
        ("LMCACHE_EXTRA_CONFIG", "[1]", "a JSON object"),
        ("LMCACHE_MAX_LOCAL_CPU_SIZE", "-1", "0 or more GB"),
        ("LMCACHE_MIN_RETRIEVE_TOKENS", "-1", "settings that LMCache accepts"),
        ("LMCACHE_USE_LAYERWISE", "True", "use_layerwise=False"),
        ("LMCACHE_ENABLE_BLENDING", "1", "enable_blending=False"),
        ("LMCACHE_LOCAL_CPU", "False", "a tier"),
        ("LMCACHE_DEVICE_BACKEND", "cuda", "rbln"),
        ("LMCACHE_MP_TRANSFER_MODE", "lmcache_driven", "auto or engine_driven"),
        ("LMCACHE_CHUNKSIZE", "256", "LMCACHE_CHUNK_SIZE"),
        ("LMCACHE_MAX_LOCAL_CPU", "5", "LMCACHE_MAX_LOCAL_CPU_SIZE"),
        ("LMCACHE_DEVICE_BACKENDS", "rbln", "LMCACHE_DEVICE_BACKEND"),
    ],
)
def test_a_setting_that_does_not_do_what_it_says(
    settings: Settings, name: str, value: str, wanted: str
) -> None:
    result = settings.check(None, **{name: value})
    assert result.status is Status.FAIL
    assert wanted in result.wanted
    assert result.fix
    shown = name.removeprefix("LMCACHE_").lower()
    told = result.found + result.fix
    assert name in told or shown in told


def test_a_name_like_no_other_is_a_warning(settings: Settings) -> None:
    result = settings.check(LMCACHE_ZZZZZZ="1")
    assert result.status is Status.WARN
    assert "LMCACHE_ZZZZZZ" in result.found
    assert result.fix == "unset LMCACHE_ZZZZZZ"
    worse = settings.check(LMCACHE_USE_LAYERWISE="True")
    assert worse.status is Status.FAIL
    assert "use_layerwise=True" in worse.found


def test_names_that_are_no_settings_but_read_are_known(settings: Settings) -> None:
    assert {"LMCACHE_CONFIG_FILE", "LMCACHE_LOG_LEVEL"} <= known_names()
    result = settings.check(
        LMCACHE_LOG_LEVEL="DEBUG",
        LMCACHE_RBLN_STAGING_MIB="64",
        LMCACHE_DEVICE_BACKEND="rbln",
        LMCACHE_MP_TRANSFER_MODE="auto",
        LMCACHE_EC_CHUNK_SIZE="256",
    )
    assert result.status is Status.OK, result


def test_every_problem_is_named(settings: Settings) -> None:
    result = settings.check(
        LMCACHE_LOCAL_CPU="yes", LMCACHE_CHUNK_SIZE="k", LMCACHE_ZZZZZZ="1"
    )
    assert result.status is Status.FAIL
    for name in ("LMCACHE_LOCAL_CPU", "LMCACHE_CHUNK_SIZE", "LMCACHE_ZZZZZZ"):
        assert name in result.found
        assert name in result.fix


def test_a_configuration_file_counts_and_the_environment_wins(
    settings: Settings, tmp_path: Path
) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 512\nlocal_cpu: true\n")
    result = settings.check(LMCACHE_CONFIG_FILE=str(file), LMCACHE_CHUNK_SIZE="1024")
    assert result.status is Status.OK, result
    assert result.details["values"] == {"chunk_size": 1024, "local_cpu": True}
    assert str(file) in result.found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, "No such file"),
        ("a: [", "can't be parsed"),
        ("- 1", "holds a list"),
        ("chunk_sise: 1", "chunk_sise is not a name"),
        ("local_cpu: 'yes'", "local_cpu='yes'"),
        ("chunk_size: many", "chunk_size='many'"),
    ],
)
def test_a_configuration_file_that_is_wrong(
    settings: Settings, tmp_path: Path, text: str | None, found: str
) -> None:
    file = tmp_path / "lmcache.yaml"
    if text is not None:
        file.write_text(text)
    result = settings.check(LMCACHE_CONFIG_FILE=str(file))
    assert result.status is Status.FAIL
    assert found in result.found
    assert str(file) in result.found


def test_settings_of_the_connector_count(settings: Settings) -> None:
    good = settings.check(
        {"lmcache.chunk_size": 2048, "lmcache.mp.port": 1, "other": 1},
        LMCACHE_CHUNK_SIZE="256",
    )
    assert good.details["values"]["chunk_size"] == 2048
    bad = settings.check({"lmcache.chunk_sizes": 2048})
    assert bad.status is Status.FAIL
    assert "kv_connector_extra_config lmcache.chunk_sizes" in bad.found
    assert bad.wanted == "chunk_size"


def test_settings_of_lmcache_rbln(settings: Settings) -> None:
    name = "lmcache_rbln.allow_degraded"
    assert settings.check({name: True}).status is Status.OK
    bad = settings.check({name: "maybe"})
    assert bad.status is Status.FAIL
    assert f"{name} wants true or false" in bad.found
    unknown = settings.check(LMCACHE_EXTRA_CONFIG='{"lmcache_rbln.allow": 1}')
    assert f"did you mean {name}" in unknown.found


def extra(**change: str | None) -> str:
    entries = {
        "storage_plugin.RDSBackend.module_path": "lmcache_rbln.diagnose.rds",
        "storage_plugin.RDSBackend.class_name": "RDSBackend",
    }
    for key, value in change.items():
        entries[f"storage_plugin.RDSBackend.{key}"] = value or ""
    return json.dumps(entries)


def test_a_storage_plugin_that_is_there(settings: Settings) -> None:
    result = settings.check(
        LMCACHE_STORAGE_PLUGINS="RDSBackend", LMCACHE_EXTRA_CONFIG=extra()
    )
    assert result.status is Status.OK, result


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ("{}", "no module_path"),
        (extra(class_name=None), "no class_name"),
        (extra(module_path="lmcache_rbln.no_such"), "no module lmcache_rbln.no_such"),
        (extra(module_path="no_such_package.x"), "module no_such_package.x: No module"),
    ],
)
def test_a_storage_plugin_that_lmcache_would_only_log_about(
    settings: Settings, config: str, found: str
) -> None:
    result = settings.check(
        LMCACHE_STORAGE_PLUGINS="RDSBackend", LMCACHE_EXTRA_CONFIG=config
    )
    assert result.status is Status.FAIL
    assert f"storage plugin RDSBackend: {found}" in result.found


def test_secrets_are_not_shown(settings: Settings) -> None:
    result = settings.check(
        LMCACHE_REMOTE_URL="redis://user:hunter2@host:1",
        LMCACHE_EXTRA_CONFIG='{"s3_secret": "hunter2", "a": {"password": "hunter2"}}',
    )
    assert result.status is Status.OK, result
    assert "hunter2" not in repr(result)
    assert "redis://***@host:1" in result.found
    assert without_secrets("min_retrieve_tokens", 3) == 3
    wrong = settings.check(LMCACHE_EXTRA_CONFIG='{"password": "hunter2"')
    assert wrong.status is Status.FAIL
