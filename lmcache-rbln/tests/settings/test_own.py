# SPDX-License-Identifier: Apache-2.0
"""The ``lmcache_rbln.*`` settings."""

# Third Party
import pytest

# First Party
from lmcache_rbln.settings import Settings


def test_defaults_stop_instead_of_degrading_and_recompute_instead_of_failing() -> None:
    assert Settings.parse(None, {"lmcache.chunk_size": 1}) == Settings(
        allow_degraded=False, load_failure_policy="recompute"
    )


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(True, True), (False, False), ("true", True), (" False ", False), (1, True)]
    + [("0", False), ("TRUE", True)],
)
def test_booleans(value: object, wanted: bool) -> None:
    settings = Settings.parse({"lmcache_rbln.allow_degraded": value})
    assert settings.allow_degraded is wanted


@pytest.mark.parametrize("value", ["yes", "on", "", None, 2, [True]])
def test_a_value_that_is_no_boolean_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="allow_degraded must be true or false"):
        Settings.parse({"lmcache_rbln.allow_degraded": value})


def test_a_later_source_overrides() -> None:
    settings = Settings.parse(
        {"lmcache_rbln.load_failure_policy": "fail"},
        {"lmcache_rbln.load_failure_policy": "recompute"},
    )
    assert settings.load_failure_policy == "recompute"
