# SPDX-License-Identifier: Apache-2.0
"""Names: what is a misspelling, and what is somebody else's."""

# Future
from __future__ import annotations

# Third Party
import pytest

# First Party
from lmcache_rbln.settings import examine, names, table
from lmcache_rbln.settings.rules import VllmFacts


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("LMCACHE_CHUNKSIZE", "LMCACHE_CHUNK_SIZE"),
        ("LMCACHE_CHUNK_SISE", "LMCACHE_CHUNK_SIZE"),
        ("LMCACHE_MAX_LOCAL_CPU_SIZES", "LMCACHE_MAX_LOCAL_CPU_SIZE"),
        ("LMCACHE_RBLN_STAGING_MB", "LMCACHE_RBLN_STAGING_MIB"),
        ("LMCACHE_GDS_PAHT", ""),
        ("LMCACHE_USE_LAYERWISEE", ""),
        ("LMCACHE_PD_ROLES", ""),
        ("LMCACHE_DISK_PATH", ""),
    ],
)
def test_a_slip_of_a_letter_or_two_means_a_setting_that_works_here(
    name: str, meant: str
) -> None:
    assert names.meant(name, names.supported_variables()) == meant


def test_what_is_off_is_never_meant() -> None:
    supported = set(names.supported())
    assert {"chunk_size", "local_cpu", "remote_url"} <= supported
    assert not supported & set(table.OFF)
    assert supported <= set(table.definitions())


def test_every_setting_is_meant_by_its_own_slip_and_advised_names_are_known() -> None:
    for name in names.supported():
        slip = f"LMCACHE_{name.upper()}S"
        advised = names.meant(slip, names.supported_variables())
        assert advised, name
        settings, _ = examine({advised: "1"}, {}, VllmFacts(1, 1))
        assert not any("is not a name" in p.found for p in settings.problems), name


@pytest.mark.parametrize(
    ("name", "internal"),
    [
        ("to_dict", True),
        ("validate", True),
        ("_user_set_keys", True),
        ("chunk_size", False),
        ("extra_config", False),
        ("nothing_like_it", False),
    ],
)
def test_what_a_connector_key_would_replace(name: str, internal: bool) -> None:
    assert names.is_internal(name) == internal
