# SPDX-License-Identifier: Apache-2.0
"""LMCache's settings as LMCache parses them, and what it would not tell about them.

LMCache reads a malformed boolean as False, ignores a name that it does not know, and
logs a line about a malformed number. Here each of these is named.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any
import importlib.util
import math
import re

# Local
from lmcache_rbln.diagnose.result import one_line

_PREFIX = "LMCACHE_"
_FILE = "LMCACHE_CONFIG_FILE"
# Entries of kv_connector_extra_config for LMCache's configuration, and for its client
# of a server.
_CONNECTOR = "lmcache."
_SERVER = "lmcache.mp."
# Settings of which any keeps chunks somewhere.
_TIERS = (
    "local_cpu",
    "local_disk",
    "remote_url",
    "storage_plugins",
    "remote_storage_plugins",
    "gds_path",
    "maru_path",
    "enable_pd",
    "enable_p2p",
)
_NAME = re.compile(r"LMCACHE_[A-Z0-9_]+")
_BOOLEANS = ("true", "false", "1", "0")
_SECRET = re.compile(r"passw|secret|credential|access_key|api_key|auth|_token$", re.I)
_USER_IN_URL = re.compile(r"//[^/@\s]+@")
# How alike a name must be to be taken for a misspelling.
_ALIKE = 0.8

Problem = dict[str, Any]


def parse(
    environment: Mapping[str, str], connector_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Parse the settings as LMCache's vLLM connector does at start-up.

    A configuration server (``remote_config_url``) is not asked.

    Args:
        environment: This process's environment; LMCache reads it by itself.
        connector_config: vLLM's ``kv_connector_extra_config``.

    Returns:
        ``values`` (what was set, by name, without secrets), ``problems``,
        ``chunk_size``, ``plugins`` (module of each storage plugin), ``file``, and
        ``error`` if LMCache refuses the settings.
    """
    # First Party
    from lmcache.v1 import config as lmcache_config
    from lmcache.v1.config_base import validate_and_set_config_value

    config_class = lmcache_config.LMCacheEngineConfig
    definitions = config_class._config_definitions
    aliases = getattr(lmcache_config, "_CONFIG_ALIASES", {})
    problems = environment_problems(environment, definitions, aliases, known_names())
    file = environment.get(_FILE)
    if file is not None:
        problems += file_problems(file, definitions, aliases)
    connector_settings = {
        key[len(_CONNECTOR) :]: value
        for key, value in connector_config.items()
        if key.startswith(_CONNECTOR) and not key.startswith(_SERVER)
    }
    for key, value in connector_settings.items():
        shown = f"kv_connector_extra_config lmcache.{key}"
        problems += _value_problems(shown, key, value, definitions, aliases)
    facts: dict[str, Any] = {"problems": problems, "file": file, "values": {}}
    try:
        if file is None:
            config = config_class.from_env()
            config.validate()
        else:
            config = config_class.from_file(file)
            config.update_config_from_env()
        for key, value in connector_settings.items():
            if key in definitions:
                validate_and_set_config_value(config, key, value)
    except Exception as error:
        # A malformed value is the reason, if there is one.
        if all(problem.get("harmless") for problem in problems):
            facts["error"] = one_line(f"{type(error).__name__}: {error}")
        return facts
    was_set = set(getattr(config, "_user_set_keys", ())) | set(connector_settings)
    facts["values"] = {
        name: without_secrets(name, getattr(config, name))
        for name in definitions
        if name in was_set
    }
    facts["chunk_size"] = config.chunk_size
    # A value that was misread would show here again.
    if all(problem.get("harmless") for problem in problems):
        problems += combination_problems(config, connector_config)
    facts["plugins"] = plugin_modules(config)
    return facts


@cache
def known_names() -> frozenset[str]:
    """Return every ``LMCACHE_*`` name in the sources of LMCache and this package."""
    names: set[str] = set()
    for package in ("lmcache", "lmcache_rbln"):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in Path(folder).rglob("*.py"):
                if path.parent != Path(__file__).parent:
                    text = path.read_text(encoding="utf-8", errors="replace")
                    names.update(_NAME.findall(text))
    return frozenset(names)


def environment_problems(
    environment: Mapping[str, str],
    definitions: Mapping[str, Mapping[str, Any]],
    aliases: Mapping[str, str],
    known: Iterable[str],
) -> list[Problem]:
    """Find variables that LMCache ignores or misreads.

    Args:
        environment: The environment.
        definitions: LMCache's definition of each setting.
        aliases: Older names of settings.
        known: More ``LMCACHE_*`` names that are read; one that ends with an underscore
            stands for all that begin with it.
    """
    settings = {_PREFIX + name.upper(): name for name in [*definitions, *aliases]}
    names = set(known)
    families = tuple(n for n in names if n.endswith("_") and n != _PREFIX)
    candidates = sorted({*settings, *(n for n in names if not n.endswith("_"))})
    problems = []
    for variable in sorted(v for v in environment if v.startswith(_PREFIX)):
        name = settings.get(variable)
        if name is not None:
            value = environment[variable]
            problems += _value_problems(variable, name, value, definitions, aliases)
        elif variable not in names and not variable.startswith(families):
            problems.append(_unknown(variable, candidates, f"unset {variable}"))
    return problems


def file_problems(
    file: str,
    definitions: Mapping[str, Mapping[str, Any]],
    aliases: Mapping[str, str],
) -> list[Problem]:
    """Find what is wrong with a configuration file and its entries."""
    # Third Party
    import yaml

    wanted = "a YAML file with one mapping of settings"
    fix = f"correct the file, or unset {_FILE}"
    try:
        entries = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        found = f"{_FILE}={file}: {error.strerror}"
        return [{"found": found, "wanted": wanted, "fix": fix}]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        found = one_line(f"{file} can't be parsed: {error}")
        return [{"found": found, "wanted": wanted, "fix": fix}]
    if entries is None:
        return []
    if not isinstance(entries, dict):
        found = f"{file} holds a {type(entries).__name__}"
        return [{"found": found, "wanted": wanted, "fix": fix}]
    problems = []
    for key, value in entries.items():
        problems += _value_problems(f"{file}: {key}", key, value, definitions, aliases)
    return problems


def _value_problems(
    shown: str,
    name: str,
    value: object,
    definitions: Mapping[str, Mapping[str, Any]],
    aliases: Mapping[str, str],
) -> list[Problem]:
    """Check one setting; ``shown`` is what the user knows it by."""
    name = aliases.get(name, name)
    if name not in definitions:
        return [_unknown(shown, list(definitions), f"remove {shown}", name)]
    wanted = _malformed(value, definitions[name])
    if wanted is None:
        return []
    return [
        {
            "found": f"{shown}={without_secrets(name, value)!r}",
            "wanted": f"{name}: {wanted}",
            "fix": f"set {shown} to {wanted.split(';')[0]}",
        }
    ]


def _malformed(value: object, definition: Mapping[str, Any]) -> str | None:
    """Return what a value should be, or None if LMCache understands it."""
    # First Party
    from lmcache.v1.config_base import _parse_quoted_string

    converter = definition["env_converter"]
    if value is None:
        return None
    if isinstance(value, str):
        value = _parse_quoted_string(value)
    if definition["type"] is bool or converter.__name__ == "_to_bool":
        if str(value).strip().lower() in _BOOLEANS:
            return None
        return "true or false; LMCache reads anything else as false"
    try:
        converted = converter(value)
    except Exception as error:
        kind = {int: "a whole number", float: "a number"}.get(converter)
        return kind or one_line(f"a value that can be parsed; {error}", 100)
    if isinstance(converted, float) and not math.isfinite(converted):
        return "a finite number"
    is_extra = "dict" in str(definition["type"]).lower()
    if is_extra and not isinstance(converted, dict | None):
        return "a JSON object"
    return None


def _unknown(shown: str, candidates: list[str], fix: str, name: str = "") -> Problem:
    name = name or shown
    near = [c for c in candidates if c.startswith(f"{name}_")]
    if len(near) != 1:
        near = get_close_matches(name, candidates, 1, _ALIKE)
    if near:
        return {
            "found": f"{shown} is not a name that LMCache reads",
            "wanted": near[0],
            "fix": f"rename {shown} to {near[0]}",
        }
    return {
        "found": f"{shown} is not a name that LMCache reads",
        "wanted": "names that LMCache reads",
        "fix": fix,
        "harmless": True,
    }


def combination_problems(
    config: Any, connector_config: Mapping[str, Any]
) -> list[Problem]:
    """Find settings that LMCache accepts and RBLN can't work with.

    Args:
        config: LMCache's parsed configuration.
        connector_config: vLLM's ``kv_connector_extra_config``.
    """
    # First Party
    from lmcache_rbln.integration.vllm.startup_checks import UNSUPPORTED
    from lmcache_rbln.settings import Settings

    extra = config.extra_config or {}
    problems: list[Problem] = [
        {
            "found": f"{name}={getattr(config, name)}",
            "wanted": f"{name}=False: {what} is not supported on RBLN",
            "fix": f"export {variable}=False",
        }
        for name, variable, what in UNSUPPORTED
        if getattr(config, name, False)
    ]
    try:
        Settings.parse(extra, connector_config)
    except ValueError as error:
        problems.append(
            {
                "found": one_line(error),
                "wanted": "settings of lmcache-rbln that it knows",
                "fix": f"correct {_PREFIX}EXTRA_CONFIG or kv_connector_extra_config",
            }
        )
    has_tier = any(getattr(config, name, None) for name in _TIERS)
    if not has_tier and not extra.get("enable_nixl_storage"):
        problems.append(
            {
                "found": "no storage tier is on: nothing would be kept",
                "wanted": "a tier",
                "fix": f"export {_PREFIX}LOCAL_CPU=True, or name a storage plugin",
            }
        )
    for size in ("max_local_cpu_size", "max_local_disk_size"):
        value = getattr(config, size, None)
        if isinstance(value, int | float) and value < 0:
            variable = _PREFIX + size.upper()
            problems.append(
                {
                    "found": f"{size}={value}",
                    "wanted": f"{size}: 0 or more GB",
                    "fix": f"correct {variable}",
                }
            )
    for plugin, module in plugin_modules(config).items():
        problem = _plugin_problem(config, plugin, module)
        if problem:
            problems.append(
                {
                    "found": f"storage plugin {plugin}: {problem}",
                    "wanted": f"storage_plugin.{plugin}.module_path and .class_name of "
                    "a module that is installed",
                    "fix": f"correct {_PREFIX}EXTRA_CONFIG; LMCache would start "
                    "without the plugin",
                }
            )
    return problems


def plugin_modules(config: Any) -> dict[str, str | None]:
    """Return the module of each storage plugin that the configuration names."""
    extra = config.extra_config or {}
    return {
        plugin: extra.get(f"storage_plugin.{plugin}.module_path")
        for plugin in getattr(config, "storage_plugins", None) or ()
    }


def _plugin_problem(config: Any, plugin: str, module: str | None) -> str:
    extra = config.extra_config or {}
    if not module:
        return "no module_path"
    if not extra.get(f"storage_plugin.{plugin}.class_name"):
        return "no class_name"
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError) as error:
        return f"module {module}: {one_line(error)}"
    return "" if spec else f"no module {module}"


def without_secrets(name: str, value: Any) -> Any:
    """Return a value that can be shown: no passwords, keys or users in URLs."""
    if value is not None and _SECRET.search(name):
        return "***"
    if isinstance(value, dict):
        return {key: without_secrets(str(key), entry) for key, entry in value.items()}
    if isinstance(value, str):
        return _USER_IN_URL.sub("//***@", value)
    return value
