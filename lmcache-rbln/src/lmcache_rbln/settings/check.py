# SPDX-License-Identifier: Apache-2.0
"""The one check of all settings, as the engine and the diagnostic ask for it."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
import importlib

# Local
from . import places, rules, table
from .config_file import FILE, read_file
from .masking import show
from .places import CONNECTOR, Entry, Settings
from .problem import Problem
from .rules import VllmFacts

_BACKEND = "LMCACHE_DEVICE_BACKEND"
_MODE = "LMCACHE_MP_TRANSFER_MODE"
_SKIP_SAVE = "LMCACHE_FORCE_SKIP_SAVE"
_MODES = ("auto", "engine_driven")
_RBLN = "lmcache.v1.platform.devices.rbln"
# Where the backend reads its own variables; each raises ValueError for a bad one.
_BACKEND_READERS = {
    "LMCACHE_RBLN_STAGING_MIB": (f"{_RBLN}.settings", "staging_mib"),
    "LMCACHE_RBLN_TRANSPOSE_THREADS": (f"{_RBLN}.settings", "transpose_threads"),
    "LMCACHE_RBLN_KV_LAYOUT": (
        "lmcache.v1.gpu_connector.kv_format.detectors.vllm_rbln",
        "_axis_setting",
    ),
}


def examine(
    environment: Mapping[str, str], connector: Mapping[str, Any], facts: VllmFacts
) -> tuple[Settings, list[Problem]]:
    """Check every setting of LMCache in process.

    Args:
        environment: The environment of the process.
        connector: vLLM's ``kv_connector_extra_config``.
        facts: vLLM's own settings.

    Returns:
        The settings that hold, and what is wrong: what does not work first, in the
        order in which it stands in the way, then what has no effect.
    """
    found = [*_of_environment(environment), *_skipped_stores(environment)]
    file = environment.get(FILE)
    entries: dict[Any, Any] = {}
    if file is not None:
        entries, problem = read_file(file)
        found += [problem] if problem else []
    settings = places.gather(environment, connector, entries, file or "")
    found += settings.problems + rules.problems(settings, facts)
    for key, value in connector.items():
        if str(key).startswith(rules.own.PREFIX):
            found += rules.own_problems(str(key), value, CONNECTOR)
    if all(problem.harmless for problem in found):
        found += rules.lmcache_problems(settings)
    return settings, sorted(found, key=lambda problem: problem.harmless)


def require(
    environment: Mapping[str, str], connector: Mapping[str, Any], facts: VllmFacts
) -> Settings:
    """Refuse to start with settings that do not work.

    Args:
        environment: The environment of the process.
        connector: vLLM's ``kv_connector_extra_config``.
        facts: vLLM's own settings.

    Returns:
        The settings that hold.

    Raises:
        ValueError: A line for each problem.
    """
    settings, found = examine(environment, connector, facts)
    _raise(found)
    return settings


def require_parsed(config: Any, settings: Settings, facts: VllmFacts) -> None:
    """Refuse what LMCache has in the end.

    A configuration server (``remote_config_url``) may have changed it, or an engine
    that was in this process before.

    Args:
        config: LMCache's configuration.
        settings: What :func:`require` returned.
        facts: vLLM's own settings.

    Raises:
        ValueError: A line for each problem.
    """
    held = Settings(
        {
            name: settings.entries[name]
            if name in settings.entries and value == settings.values.get(name)
            else Entry(name, "the configuration server, or start vLLM in a new process")
            for name in table.definitions()
            if (value := getattr(config, name)) != table.definitions()[name]["default"]
        },
        dict(settings.values) | {n: getattr(config, n) for n in table.definitions()},
        dict(config.extra_config or {}),
        settings.extra_place,
    )
    _raise(rules.problems(held, facts))


def examine_server(
    environment: Mapping[str, str], connector: Mapping[str, Any]
) -> list[Problem]:
    """Check the settings of ``LMCacheMPConnector``, as far as LMCache would not tell.

    Args:
        environment: The environment of the process.
        connector: vLLM's ``kv_connector_extra_config``.
    """
    found = list(_of_environment(environment))
    found += mode_problems(environment)
    settings = places.gather(environment, {})
    # It reads none of these, so they can do no harm, nor any good.
    found += [replace(problem, harmless=True) for problem in settings.problems]
    prefix, wanted = places.SERVER_PREFIX, "a text host:port, or a list of them"
    urls = connector.get(f"{prefix}server_urls")
    texts = [urls] if isinstance(urls, str) else urls
    if urls and not (
        isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    ):
        entry = Entry(f"{prefix}server_urls", CONNECTOR)
        shown = f"{entry.where} is {show(urls)}"
        found.append(Problem(entry.label, shown, wanted, entry.set_to(wanted)))
    port = connector.get(f"{prefix}port", 1)
    reading = table.read_number(
        int(port) if isinstance(port, str) and port.isdecimal() else port,
        (1, 65535, ""),
    )
    if reading.wanted:
        entry = Entry(f"{prefix}port", CONNECTOR)
        shown = f"{entry.where} is {show(port, kind='number')}"
        found.append(
            Problem(entry.label, shown, reading.wanted, entry.set_to(reading.wanted))
        )
    return found


def mode_problems(environment: Mapping[str, str]) -> list[Problem]:
    """Check how the workers of a server hand their KV over.

    Args:
        environment: The environment of the process.
    """
    mode = environment.get(_MODE, "").strip().lower()
    if not mode or mode in _MODES:
        return []
    shown = show(environment[_MODE], ("lmcache_driven",), "number")
    return [
        Problem(_MODE, f"{_MODE} is {shown}", " or ".join(_MODES), f"unset {_MODE}")
    ]


def _of_environment(environment: Mapping[str, str]) -> Iterator[Problem]:
    """Check what is read from the environment by other parts than the configuration."""
    backend = environment.get(_BACKEND, "").strip().lower()
    if backend not in ("", "rbln"):
        shown = show(environment[_BACKEND], kind="number")
        yield Problem(
            _BACKEND, f"{_BACKEND} is {shown}", "rbln", f"export {_BACKEND}=rbln"
        )
    for variable, (module, function) in _BACKEND_READERS.items():
        if variable not in environment:
            continue
        try:
            readers = importlib.import_module(module)
        except ImportError:
            continue  # LMCache without the RBLN backend
        try:
            getattr(readers, function)()
        except ValueError as error:
            value = environment[variable].strip()
            shown = show(value, kind="number")
            text = str(error).replace(repr(value), shown)
            yield Problem(variable, text, "a value that has a meaning", "correct it")


def _skipped_stores(environment: Mapping[str, str]) -> Iterator[Problem]:
    value = environment.get(_SKIP_SAVE, "").strip().lower()
    if value in ("false", "0", "no", "off", "none"):
        yield Problem(
            _SKIP_SAVE,
            f"{_SKIP_SAVE} is {value!r}, and any value keeps LMCache from storing",
            "1, or no such variable",
            f"unset {_SKIP_SAVE}",
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
