# SPDX-License-Identifier: Apache-2.0
"""The one check of all settings, as the engine and the diagnostic ask for it."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterator, Mapping
from typing import Any
import importlib

# Local
from . import own, rules, table
from .masking import show
from .places import CONNECTOR, Problem, Settings, gather

HASH_SEED = "PYTHONHASHSEED"
#: How the workers of a server hand their KV over.
MODE = "LMCACHE_MP_TRANSFER_MODE"
# Variables that other parts read than LMCache's configuration, and their values.
_WORDS = {
    "LMCACHE_DEVICE_BACKEND": ("rbln",),
    MODE: ("auto", "engine_driven"),
    # LMCache takes any text, also "False".
    "LMCACHE_FORCE_SKIP_SAVE": ("1", "true", "yes", "on"),
}
_SETTINGS = "lmcache.v1.platform.devices.rbln.settings"
_DETECTOR = "lmcache.v1.gpu_connector.kv_format.detectors.vllm_rbln"
# Where the backend reads its own variables; each raises ValueError for a bad one.
_BACKEND_READERS = {
    "LMCACHE_RBLN_STAGING_MIB": (_SETTINGS, "staging_mib"),
    "LMCACHE_RBLN_TRANSPOSE_THREADS": (_SETTINGS, "transpose_threads"),
    "LMCACHE_RBLN_KV_LAYOUT": (_DETECTOR, "_axis_setting"),
}


def examine(
    environment: Mapping[str, str],
    connector: Mapping[str, Any],
    block_size: int | None,
) -> tuple[Settings, list[Problem]]:
    """Check every setting of LMCache in process.

    Args:
        environment: The environment of the process.
        connector: vLLM's ``kv_connector_extra_config``.
        block_size: vLLM's block size in tokens; None if it is not known.

    Returns:
        The settings that hold, and what is wrong: what does not work first, in the
        order in which it stands in the way, then what has no effect.
    """
    settings = gather(environment, connector)
    found = [p for p in variable_problems(environment) if p.setting != MODE]
    found += settings.problems + rules.problems(settings, block_size)
    for key, value in connector.items():
        if str(key).startswith(own.PREFIX):
            found += rules.own_problems(str(key), value, CONNECTOR)
    if all(problem.harmless for problem in found):
        found += rules.lmcache_problems(settings)
    return settings, sorted(found, key=lambda problem: problem.harmless)


def require(
    environment: Mapping[str, str],
    connector: Mapping[str, Any],
    block_size: int | None,
) -> Settings:
    """Refuse to start with what :func:`examine` finds, or a hash seed that differs.

    Returns:
        The settings that hold.

    Raises:
        ValueError: A line for each problem.
    """
    settings, found = examine(environment, connector, block_size)
    if seed := hash_seed_problem(environment):
        found.insert(0, seed)
    _raise(found)
    return settings


def require_parsed(config: Any, settings: Settings, block_size: int | None) -> None:
    """Refuse what LMCache has in the end.

    A configuration server (``remote_config_url``) may have changed it, or an engine
    that was in this process before.

    Args:
        config: LMCache's configuration.
        settings: What :func:`require` returned.
        block_size: vLLM's block size in tokens.

    Raises:
        ValueError: A line for each problem.
    """
    held = Settings(dict(settings.where), dict(settings.values), problems=[])
    for name in table.definitions():
        if (value := getattr(config, name)) != settings.values[name]:
            where = f"{name} (of the configuration server or an earlier engine here)"
            held.put(name, where, value)
    held.extra = dict(config.extra_config or {})
    _raise(held.problems + rules.problems(held, block_size))


def variable_problems(environment: Mapping[str, str]) -> Iterator[Problem]:
    """Check what is read from the environment by other parts than the configuration."""
    for variable, words in _WORDS.items():
        value = environment.get(variable, "").strip().lower()
        if value and value not in words:
            shown = show(value, ("lmcache_driven",), "number")
            fix = f"set {variable}={words[0]}, or unset it"
            found, wanted = f"{variable} is {shown}", " or ".join(words)
            yield Problem(variable, found, wanted, fix)
    for variable, (module, function) in _BACKEND_READERS.items():
        if variable not in environment:
            continue
        try:
            getattr(importlib.import_module(module), function)()
        except ImportError:
            continue  # LMCache without the RBLN backend
        except ValueError as error:
            value = environment[variable].strip()
            text = str(error).replace(repr(value), show(value, kind="number"))
            yield Problem(variable, text, "a value that has a meaning", "correct it")


def hash_seed_problem(environment: Mapping[str, str]) -> Problem | None:
    """Tell why a prompt would get other keys in another process, if it would.

    Python's hashes are LMCache's keys by default.

    Args:
        environment: The environment.
    """
    seed = environment.get(HASH_SEED)
    if seed is not None and seed.strip().isdecimal() and int(seed) < 2**32:
        return None
    got = "it is not set" if seed is None else f"it is {show(seed, ('random',))}"
    return Problem(
        HASH_SEED,
        f"{HASH_SEED} must have a fixed value; {got}",
        "one number, the same in every process: with another in each, every lookup "
        "misses",
        f"export {HASH_SEED}=0",
    )


def _raise(found: list[Problem]) -> None:
    # First Party
    from lmcache.logging import init_logger

    for problem in found:
        if problem.harmless:
            init_logger(__name__).warning("%s", problem)
    serious = [str(problem) for problem in found if not problem.harmless]
    if serious:
        raise ValueError("\n".join(serious))
