# SPDX-License-Identifier: Apache-2.0
"""The hash seed and LMCache's settings."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping
from typing import Any

# Local
from lmcache_rbln.diagnose.result import Result, fail, ok, one_line, warn

_SEED = "PYTHONHASHSEED"
_BACKEND = "LMCACHE_DEVICE_BACKEND"
_MODE = "LMCACHE_MP_TRANSFER_MODE"
_WANTED_MODES = ("auto", "engine_driven")
_SHOWN = 240


def check_hash_seed(environment: Mapping[str, str]) -> Result:
    """Check that all processes of a server hash a prompt to the same keys."""
    name = "hash seed"
    seed = environment.get(_SEED)
    if seed is None or seed.strip().lower() in ("", "random"):
        found = f"{_SEED} is not set" if seed is None else f"{_SEED}={seed!r}"
        wanted = "a fixed value: with another in each process every lookup misses"
        return fail(name, found, wanted, f"export {_SEED}=0")
    return ok(name, f"{_SEED}={seed}")


def check_settings(facts: Mapping[str, Any], environment: Mapping[str, str]) -> Result:
    """Check that LMCache understands every setting as it was meant.

    Args:
        facts: The topic ``settings`` of the LMCache probe.
        environment: The environment with the settings.
    """
    name = "settings"
    problems = [dict(problem) for problem in facts.get("problems", ())]
    problems += _environment_problems(environment)
    if facts.get("error"):
        problems.append(
            {
                "found": f"LMCache does not start: {facts['error']}",
                "wanted": "settings that LMCache accepts",
                "fix": "see the message",
            }
        )
    values: Mapping[str, Any] = facts.get("values", {})
    if problems:
        # Many problems often have one wish or fix.
        found, wanted, fix = (
            "; ".join(dict.fromkeys(str(p[key]) for p in problems))
            for key in ("found", "wanted", "fix")
        )
        harmless = all(problem.get("harmless") for problem in problems)
        report = warn if harmless else fail
        return report(name, found, wanted, fix, values=values, problems=problems)
    text = " ".join(f"{key}={value}" for key, value in values.items())
    source = facts.get("file") or ""
    text = one_line(text, _SHOWN) or "LMCache's defaults"
    return ok(name, f"{source}: {text}" if source else text, values=values)


def _environment_problems(environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the settings that LMCache reads for itself and RBLN can't work with."""
    problems = []
    backend = environment.get(_BACKEND, "").strip().lower()
    if backend not in ("", "rbln"):
        problems.append(
            {
                "found": f"{_BACKEND}={environment[_BACKEND]}",
                "wanted": "rbln",
                "fix": f"export {_BACKEND}=rbln",
            }
        )
    mode = environment.get(_MODE, "").strip().lower()
    if mode and mode not in _WANTED_MODES:
        problems.append(
            {
                "found": f"{_MODE}={environment[_MODE]}",
                "wanted": "auto or engine_driven",
                "fix": f"unset {_MODE}",
            }
        )
    return problems
