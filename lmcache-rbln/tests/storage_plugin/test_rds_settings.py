# SPDX-License-Identifier: Apache-2.0
"""The ``rds_*`` settings: every one is checked, and a wrong one is named."""

# Standard
from dataclasses import fields
from pathlib import Path
from typing import Any
import subprocess
import sys

# Third Party
import pytest

# First Party
from lmcache_rbln.storage_plugin.rds import settings as rds_settings
from lmcache_rbln.storage_plugin.rds.settings import (
    SETTINGS,
    RDSSettings,
    read_settings,
)


def test_the_documented_settings() -> None:
    settings = read_settings(
        {
            "storage_plugin.RDSBackend.module_path": "m",
            "storage_plugin.RDSBackend.class_name": "RDSBackend",
            "rds_buffer_size": 2048,
            "rds_failure_policy": "ignore",
        }
    )
    assert settings == RDSSettings()
    assert settings.buffer_bytes == 2 << 30


@pytest.mark.parametrize("extra", [None, {}, {"lmcache_rbln.allow_degraded": True}])
def test_nothing_given_is_the_defaults(extra: Any) -> None:
    assert read_settings(extra) == RDSSettings()


def test_everything_can_be_set() -> None:
    values: dict[str, Any] = {
        "buffer_size": 3,
        "failure_policy": "raise",
        "max_chunks": 4,
        "capacity": 5,
        "write_mode": "synchronous",
        "checksum": "header",
        "wait_timeout": 1.5,
        "numa_node": 0,
    }
    assert set(values) == {field.name for field in fields(RDSSettings)}
    given = {f"rds_{name}": value for name, value in values.items()}
    settings = read_settings(given)
    assert settings == RDSSettings(**values)
    assert settings.capacity_bytes == 5 << 20


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("rds_bufer_size", "rds_buffer_size"),
        ("rds_policy", "rds_failure_policy"),
        ("rds_max_chunk", "rds_max_chunks"),
        ("rds_", "rds_"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(key: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"{key} is not .* did you mean {near}"):
        read_settings({key: 1})


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("rds_buffer_size", 0, "must be from 1 to"),
        ("rds_buffer_size", "2048", "must be a whole number, got '2048'"),
        ("rds_buffer_size", 2.5, "must be a whole number"),
        ("rds_buffer_size", True, "must be a whole number"),
        ("rds_max_chunks", -1, "must be from 0 to"),
        ("rds_capacity", None, "must be a whole number"),
        ("rds_numa_node", 5000, "must be from 0 to 1023"),
        ("rds_numa_node", -1, "must be from 0 to 1023"),
        ("rds_failure_policy", ["ignore"], "one of ignore, raise"),
        ("rds_failure_policy", "Ignore", "one of ignore, raise, got 'Ignore'"),
        ("rds_write_mode", "async", "one of auto, overlapped, synchronous"),
        ("rds_checksum", False, "one of full, header"),
        ("rds_wait_timeout", 10, "from 0 to 9 seconds"),
        ("rds_wait_timeout", "5", "a number of seconds"),
        ("rds_wait_timeout", float("nan"), "from 0 to 9 seconds"),
        ("rds_buffer_size", 2 << 30, "from 1 to 1048576 MiB"),
    ],
)
def test_a_wrong_value_is_named(key: str, value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"{key} .*{why}"):
        read_settings({key: value})


@pytest.mark.parametrize(
    ("mode", "alone", "together"),
    [
        ("auto", True, False),
        ("overlapped", True, True),
        ("synchronous", False, False),
    ],
)
def test_write_mode(mode: str, alone: bool, together: bool) -> None:
    settings = read_settings({"rds_write_mode": mode})
    assert settings.overlaps(1) is alone
    assert settings.overlaps(2) is together


@pytest.mark.parametrize(
    ("online", "nodes"),
    [("0", [0]), ("0-1", [0, 1]), ("0-2,7,9-10", [0, 1, 2, 7, 9, 10]), ("x", [0])],
)
def test_a_numa_node_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, online: str, nodes: list[int]
) -> None:
    file = tmp_path / "online"
    file.write_text(f"{online}\n")
    monkeypatch.setattr(rds_settings, "_ONLINE_NODES", file)
    for node in nodes:
        assert read_settings({"rds_numa_node": node}).numa_node == node
    there = ", ".join(map(str, nodes))
    for node in {1, 3, 8, 1023} - set(nodes):
        with pytest.raises(
            ValueError, match=f"rds_numa_node must .* has: {there}, got {node}"
        ):
            read_settings({"rds_numa_node": node})


def test_without_numa_there_is_node_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rds_settings, "_ONLINE_NODES", tmp_path / "none")
    assert read_settings({"rds_numa_node": 0}) == RDSSettings()
    with pytest.raises(ValueError, match="one that this machine has: 0, got 1"):
        read_settings({"rds_numa_node": 1})


def test_the_table_is_of_every_setting_and_of_its_default() -> None:
    assert {key.removeprefix("rds_") for key in SETTINGS} == {
        field.name for field in fields(RDSSettings)
    }
    for key, setting in SETTINGS.items():
        assert setting.wanted(setting.default) == ""
        default = getattr(RDSSettings(), key.removeprefix("rds_"))
        assert (default, type(default)) == (setting.default, type(setting.default))


def test_the_table_needs_neither_torch_nor_lmcache() -> None:
    code = (
        "import sys, lmcache_rbln.storage_plugin.rds.settings; "
        "print({'torch', 'lmcache', 'vllm'} & set(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout.strip() == "set()", ended.stderr
