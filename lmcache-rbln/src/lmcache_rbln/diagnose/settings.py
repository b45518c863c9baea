# SPDX-License-Identifier: Apache-2.0
"""The hash seed and the settings, as the engine itself checks them."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

# Local
from lmcache_rbln.diagnose.connector import IN_PROCESS, WITH_SERVER
from lmcache_rbln.diagnose.report import FAIL, OK, SKIP, WARN, Result, one_line
from lmcache_rbln.settings import check, fitting_chunk_size, rules, table


def check_hash_seed(
    environment: Mapping[str, str], connector: str, uses_server: bool
) -> Result:
    """Check that all processes of a server hash a prompt to the same keys.

    Args:
        environment: The environment of the server.
        connector: The connector's class; empty if it is not known.
        uses_server: Whether there is an LMCache server, which hashes by itself.
    """
    if connector != IN_PROCESS and uses_server:
        return Result(SKIP, "the LMCache server hashes prompts")
    if problem := check.hash_seed_problem(environment):
        status = FAIL if connector == IN_PROCESS else WARN
        wanted = f"{problem.wanted}, for {IN_PROCESS}"
        return Result(status, problem.found, wanted, problem.fix)
    return Result(OK, f"{check.HASH_SEED}={environment[check.HASH_SEED]}")


def examine(
    environment: Mapping[str, str],
    connector: str,
    extra: Mapping[str, Any],
    block_size: int | None,
) -> dict[str, Any]:
    """Check the settings; runs in the LMCache probe.

    Args:
        environment: The environment of the server.
        connector: The connector's class; empty if it is not known.
        extra: vLLM's ``kv_connector_extra_config``.
        block_size: vLLM's, in tokens; None if it is not known.

    Returns:
        ``problems``; and for LMCache in process ``values`` (what was set, by name, as
        it may be shown), ``chunk_size``, ``chunk_place`` and ``plugins`` (module of
        each storage plugin).
    """
    if connector == WITH_SERVER:
        # It reads none of the others, so they can do no harm, nor any good.
        others = check.gather(environment, {}).problems
        found = [replace(problem, harmless=True) for problem in others]
        found += check.variable_problems(environment)
        return {"problems": [asdict(problem) for problem in found]}
    settings, found = check.examine(environment, extra, block_size)
    if connector != IN_PROCESS:
        # Not known yet: what would keep the other one from working.
        found += (p for p in check.variable_problems(environment) if p not in found)
    return {
        "problems": [asdict(problem) for problem in found],
        "values": {
            name: table.show_setting(name, settings.values[name])
            for name in settings.where
            if name in table.definitions()
        },
        "chunk_size": settings.values["chunk_size"],
        "chunk_place": settings.place("chunk_size"),
        "plugins": rules.plugins(settings),
    }


def check_settings(facts: Mapping[str, Any]) -> Result:
    """Check that every setting does what it says.

    Args:
        facts: What :func:`examine` returned, or ``error``.
    """
    if facts.get("error"):
        why = one_line(f"not checked: {facts['error']}")
        return Result(FAIL, why, "an LMCache that can be asked", "see LMCache build")
    problems = [
        p for p in facts.get("problems", ()) if p["setting"] != rules.CHUNK_AND_BLOCK
    ]
    values: Mapping[str, Any] = facts.get("values", {})
    details = {"values": values, "problems": problems}
    if problems:
        # Many problems often have one wish or fix.
        found, wanted, fix = (
            "; ".join(dict.fromkeys(str(problem[key]) for problem in problems))
            for key in ("found", "wanted", "fix")
        )
        harmless = all(problem["harmless"] for problem in problems)
        return Result(WARN if harmless else FAIL, found, wanted, fix, details)
    text = one_line(" ".join(f"{key}={value}" for key, value in values.items()), 240)
    return Result(OK, text or "LMCache's defaults", details=details)


def check_chunk(
    facts: Mapping[str, Any], server_chunk: object, uses_server: bool, block: int | None
) -> Result:
    """Check that a chunk is a whole number of blocks.

    Args:
        facts: What :func:`examine` returned, or ``error``.
        server_chunk: The server's chunk size in tokens, if it told.
        uses_server: Whether there is a server, whose chunk size counts.
        block: vLLM's block size in tokens; None if it is not known.
    """
    chunk = server_chunk if uses_server else facts.get("chunk_size")
    if not isinstance(chunk, int) or chunk < 1:
        return Result(SKIP, "the chunk size is not known")
    found = f"chunk of {chunk} tokens"
    found += f" ({'server' if uses_server else facts.get('chunk_place')})"
    if block is None:
        return Result(SKIP, f"{found}; give --block-size")
    if chunk % block == 0:
        return Result(OK, f"{found}, block of {block}")
    fix = f"start the server with --chunk-size {fitting_chunk_size(chunk, block)}"
    for problem in facts.get("problems", ()):
        if problem["setting"] == rules.CHUNK_AND_BLOCK and not uses_server:
            found, fix = f"{problem['found']} ({facts['chunk_place']})", problem["fix"]
    wanted = f"a multiple of vLLM's block size {block}"
    fix += ", or start vLLM with another --block-size"
    return Result(FAIL, found, wanted, fix)
