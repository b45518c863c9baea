# SPDX-License-Identifier: Apache-2.0
"""The settings of transfers: ranges with both ends, named where they are refused."""

# Standard
from collections.abc import Iterator
import os

# Third Party
import pytest

# First Party
from lmcache import kv_transpose
from lmcache.v1.platform.devices.rbln import settings
from lmcache.v1.platform.devices.rbln.settings import (
    STAGING_ENV_VAR,
    THREADS_ENV_VAR,
    staging_mib,
    transpose_threads,
)


@pytest.fixture(autouse=True)
def fresh_settings() -> Iterator[None]:
    """Let each test read the settings anew."""
    transpose_threads.cache_clear()
    yield
    transpose_threads.cache_clear()


@pytest.mark.parametrize(
    ("raw", "mib"),
    [("64", 64), (" 8 ", 8), ("23", 23), ("0064", 64), ("4096", 4096), (" ", 64)],
)
def test_the_staging_setting_is_in_mib(
    monkeypatch: pytest.MonkeyPatch, raw: str, mib: int
) -> None:
    assert STAGING_ENV_VAR == "LMCACHE_RBLN_STAGING_MIB"
    monkeypatch.setenv(STAGING_ENV_VAR, raw)
    assert staging_mib() == mib


def test_the_staging_default_is_64_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STAGING_ENV_VAR, raising=False)
    assert staging_mib() == 64


@pytest.mark.parametrize(
    "raw",
    ["7", "0", "-4", "64M", "1.5", "²", "4097", "67108864", "9" * 5000, "0" * 5000],
)
def test_a_value_that_is_no_size_is_refused(
    monkeypatch: pytest.MonkeyPatch, raw: str
) -> None:
    monkeypatch.setenv(STAGING_ENV_VAR, raw)
    with pytest.raises(ValueError, match=f"{STAGING_ENV_VAR}=.* from 8 to 4096") as no:
        settings.require_valid()
    assert len(str(no.value)) < 300


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 1), (3, 2), (5, 4), (64, 4)])
def test_copies_keep_a_cpu(
    monkeypatch: pytest.MonkeyPatch, cpus: int, threads: int
) -> None:
    monkeypatch.delenv(THREADS_ENV_VAR, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    assert transpose_threads() == threads


def test_the_threads_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert THREADS_ENV_VAR == "LMCACHE_RBLN_TRANSPOSE_THREADS"
    monkeypatch.setenv(THREADS_ENV_VAR, " 7 ")
    assert transpose_threads() == 7
    for raw in ("0", "-1", "two", "1.5", "²", "65", "100000", "9" * 5000):
        transpose_threads.cache_clear()
        monkeypatch.setenv(THREADS_ENV_VAR, raw)
        with pytest.raises(ValueError, match=f"{THREADS_ENV_VAR}=.* from 1 to 64"):
            settings.require_valid()


def test_the_extension_has_the_same_limit() -> None:
    assert settings.THREADS_RANGE == (1, kv_transpose.MAX_THREADS)
