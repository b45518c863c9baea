# SPDX-License-Identifier: Apache-2.0
"""The seed of Python's hashes, which are LMCache's keys by default."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping

# Local
from .masking import show
from .problem import Problem

HASH_SEED = "PYTHONHASHSEED"


def hash_seed_problem(environment: Mapping[str, str]) -> Problem | None:
    """Tell why a prompt would get other keys in another process, if it would.

    Args:
        environment: The environment.
    """
    seed = environment.get(HASH_SEED)
    if seed is not None and seed.strip().isdecimal() and int(seed) < 2**32:
        return None
    got = "it is not set" if seed is None else f"it is {show(seed, ('', 'random'))}"
    return Problem(
        HASH_SEED,
        f"{HASH_SEED} must have a fixed value; {got}",
        "one number, the same in every process: with another in each, every lookup "
        "misses",
        f"export {HASH_SEED}=0",
    )
