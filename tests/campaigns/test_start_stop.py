# SPDX-License-Identifier: Apache-2.0
"""Starts and stops of the in-process connector with each storage tier, once each.

``python -m tests.campaigns.start_stop`` does the same fifty times, and with engines.
"""

# Standard
from __future__ import annotations

from dataclasses import replace
from typing import Any

# Third Party
import pytest

# First Party
from tests.campaigns.connector_trials import TIERS, Result, Trial, problems
from tests.campaigns.start_stop import CLEAN, REFUSALS, REFUSED, run_component

pytestmark = [pytest.mark.npu, pytest.mark.slow]

#: What ends at all is right here; how soon is the campaign's business.
PATIENCE_S = 300.0
VARIANTS: dict[str, dict[str, Any]] = {
    "kv-first": {"kv_first": True},
    "mla": {"model": "mla"},
    "two-ranks": {"ranks": 2},
}
#: In the campaign alone: nobody's storage, and threads like others here.
LEFT_OUT = ("mock", "statistics")
STOPS = [
    *(
        Trial(tier, env, end="engine-ends")
        for tier, env in TIERS.items()
        if tier not in LEFT_OUT
    ),
    *(
        Trial(f"{tier}-{name}", TIERS[tier], end="engine-ends", **changes)
        for tier in ("cpu", "rds")
        for name, changes in VARIANTS.items()
    ),
    *(
        Trial(f"{tier}-two-ranks", TIERS[tier], end="engine-ends", ranks=2)
        for tier in ("disk", "remote")
    ),
    *(
        Trial(f"cpu-{role}", end="engine-ends", role=role)
        for role in ("kv_producer", "kv_consumer")
    ),
    Trial("remote-async", TIERS["remote"] | TIERS["async"], end="engine-ends"),
    Trial("rds-busy-stopped", TIERS["rds-busy"]),
    Trial("rds-async-process-ends", TIERS["rds-async"], end="process-ends"),
]
FAILED = [
    Trial(f"warm-up-fails-{tier}", TIERS[tier], end="engine-ends", fails=True)
    for tier in ("cpu", "rds", "async")
]
#: Refused where something runs already; what is refused before has tests of its own.
REFUSALS_BEHIND = ("cpu-tiny", "no-tier", "rds-string", "remote-scheme")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    refused = [
        Trial(name, REFUSALS[name][0], end="engine-ends", works=False)
        for name in REFUSALS_BEHIND
    ]
    folder = tmp_path_factory.mktemp("start-stop")
    trials = [*STOPS, *FAILED, *refused]
    return {result.trial: result for result in run_component(folder, trials)}


@pytest.mark.parametrize("trial", STOPS, ids=lambda trial: trial.name)
def test_what_was_stored_is_restored_and_nothing_is_left(
    results: dict[str, Result], trial: Trial
) -> None:
    result = results[trial.name]
    assert not problems(result, CLEAN, PATIENCE_S), result.log
    restored = 0 if trial.role == "kv_consumer" else trial.ranks
    assert result.log.count("restored equal") == restored, result.log
    assert ("Storage backend RDSBackend closed" in result.log) == (
        "rds" in trial.name
    ), result.log


@pytest.mark.parametrize("trial", FAILED, ids=lambda trial: trial.name)
def test_a_start_that_fails_behind_the_connector(
    results: dict[str, Result], trial: Trial
) -> None:
    result = results[trial.name]
    assert not problems(result, REFUSED, PATIENCE_S), result.log
    assert "warm-up failed" in result.log


@pytest.mark.parametrize("name", REFUSALS_BEHIND)
def test_a_refusal_while_something_runs(results: dict[str, Result], name: str) -> None:
    result = results[name]
    assert not problems(result, REFUSED, PATIENCE_S), result.log
    assert REFUSALS[name][2] in result.log.strip().splitlines()[-1]


def test_each_fault_is_a_problem() -> None:
    good = Result("t", 0, 1.0, [], "all is well")
    assert not problems(good, CLEAN, 10.0)
    for bad in (
        replace(good, status=None),
        replace(good, status=-6),
        replace(good, seconds=11.0),
        replace(good, left=["/tmp/socket"]),
        replace(good, log="Assertion failed: ok (src/mailbox.cpp:99)"),
    ):
        assert problems(bad, CLEAN, 10.0)
