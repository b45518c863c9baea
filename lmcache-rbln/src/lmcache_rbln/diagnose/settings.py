# SPDX-License-Identifier: Apache-2.0
"""The hash seed and the settings, as the engine itself checks them."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

# Local
from lmcache_rbln.diagnose.connector import IN_PROCESS, WITH_SERVER
from lmcache_rbln.diagnose.result import Result, fail, ok, one_line, skip, warn
from lmcache_rbln.settings import (
    VllmFacts,
    check,
    fitting_chunk_size,
    hash_seed_problem,
    rules,
    table,
)
from lmcache_rbln.settings.config_file import FILE
from lmcache_rbln.settings.seed import HASH_SEED

_SHOWN = 240


def check_hash_seed(environment: Mapping[str, str]) -> Result:
    """Check that all processes of a server hash a prompt to the same keys."""
    problem = hash_seed_problem(environment)
    if problem:
        return fail("hash seed", problem.found, problem.wanted, problem.fix)
    return ok("hash seed", f"{HASH_SEED}={environment[HASH_SEED]}")


def examine(
    environment: Mapping[str, str],
    connector: str,
    extra: Mapping[str, Any],
    vllm: VllmFacts,
) -> dict[str, Any]:
    """Check the settings; runs in the LMCache probe.

    Args:
        environment: The environment of the server.
        connector: The connector's class; empty if it is not known.
        extra: vLLM's ``kv_connector_extra_config``.
        vllm: What is known of vLLM.

    Returns:
        ``problems``; and for LMCache in process ``values`` (what was set, by name, as
        it may be shown), ``chunk_size``, ``chunk_place``, ``plugins`` (module of each
        storage plugin) and ``file``.
    """
    if connector == WITH_SERVER:
        found = check.examine_server(environment, extra)
        return {"problems": [asdict(problem) for problem in found]}
    settings, found = check.examine(environment, extra, vllm)
    if connector != IN_PROCESS:
        # Not known yet: what would keep the other one from working.
        found += check.mode_problems(environment)
    values = settings.values
    return {
        "problems": [asdict(problem) for problem in found],
        "values": {
            name: table.show_setting(name, values[name])
            for name in settings.entries
            if name in values
        },
        "chunk_size": values.get("chunk_size"),
        "chunk_place": settings.entry("chunk_size").where,
        "plugins": rules.plugins(settings),
        "file": environment.get(FILE),
    }


def check_settings(facts: Mapping[str, Any]) -> Result:
    """Check that every setting does what it says.

    Args:
        facts: What :func:`examine` returned, or ``error``.
    """
    name = "settings"
    if facts.get("error"):
        why = one_line(f"not checked: {facts['error']}")
        return fail(name, why, "an LMCache that can be asked", "see LMCache build")
    problems: Sequence[Mapping[str, Any]] = [
        problem
        for problem in facts.get("problems", ())
        if problem["setting"] != rules.CHUNK_AND_BLOCK
    ]
    values: Mapping[str, Any] = facts.get("values", {})
    if problems:
        # Many problems often have one wish or fix.
        found, wanted, fix = (
            "; ".join(dict.fromkeys(str(p[key]) for p in problems))
            for key in ("found", "wanted", "fix")
        )
        harmless = all(problem["harmless"] for problem in problems)
        report = warn if harmless else fail
        return report(name, found, wanted, fix, values=values, problems=problems)
    text = " ".join(f"{key}={value}" for key, value in values.items())
    source = facts.get("file") or ""
    text = one_line(text, _SHOWN) or "LMCache's defaults"
    return ok(name, f"{source}: {text}" if source else text, values=values)


def check_chunk(
    facts: Mapping[str, Any],
    server_chunk: object,
    uses_server: bool,
    block: int | None,
) -> Result:
    """Check that a chunk is a whole number of blocks.

    Args:
        facts: What :func:`examine` returned, or ``error``.
        server_chunk: The server's chunk size in tokens, if it told.
        uses_server: Whether there is a server, whose chunk size counts.
        block: vLLM's block size in tokens; None if it is not known.
    """
    name = "chunk and block"
    chunk = server_chunk if uses_server else facts.get("chunk_size")
    if not isinstance(chunk, int) or chunk < 1:
        return skip(name, "the chunk size is not known")
    place = "server" if uses_server else facts.get("chunk_place")
    if block is None:
        return skip(name, f"chunk of {chunk} tokens ({place}); give --block-size")
    problem = next(
        (
            problem
            for problem in facts.get("problems", ())
            if problem["setting"] == rules.CHUNK_AND_BLOCK
        ),
        None,
    )
    if uses_server and chunk % block:
        fit = fitting_chunk_size(chunk, block)
        return fail(
            name,
            f"chunk of {chunk} tokens (server), block of {block}",
            "a chunk that is a multiple of the block",
            f"start the server with --chunk-size {fit}, or start vLLM with another "
            "--block-size",
        )
    if problem and not uses_server:
        fix = f"{problem['fix']}, or start vLLM with another --block-size"
        return fail(name, f"{problem['found']} ({place})", problem["wanted"], fix)
    return ok(name, f"chunk of {chunk} tokens ({place}), block of {block}")
