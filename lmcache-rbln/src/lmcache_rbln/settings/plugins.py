# SPDX-License-Identifier: Apache-2.0
"""Storage plugins that the settings name."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterator
from typing import Any
import importlib

# Local
from .masking import show, show_name
from .places import Settings
from .problem import Problem

#: Where the storage plugin for RDS lives.
RDS_MODULE = "lmcache_rbln.storage_plugin.rds_backend"
#: Settings that name plugins, and how the keys of a plugin's own begin.
PLUGINS = {
    "storage_plugins": "storage_plugin",
    "remote_storage_plugins": "remote_storage_plugin",
}


def plugins(settings: Settings) -> dict[str, str | None]:
    """Return the module of each storage plugin that is named."""
    extra = settings.extra
    return {
        str(name): extra.get(f"storage_plugin.{name}.module_path")
        for name in settings.values.get("storage_plugins") or ()
    }


def plugin_problems(settings: Settings) -> Iterator[Problem]:
    """Find storage plugins that LMCache could not make, and would go on without.

    Args:
        settings: The settings. The modules that they name are imported.
    """
    for setting, prefix in PLUGINS.items():
        for name in settings.values[setting] or ():
            module_key = f"{prefix}.{name}.module_path"
            class_key = f"{prefix}.{name}.class_name"
            module = settings.extra.get(module_key)
            class_name = settings.extra.get(class_key)
            if prefix != "storage_plugin" and module is None and class_name is None:
                continue  # LMCache has remote backends of its own
            problem = _import_problem(module, class_name)
            if not problem:
                continue
            entry = settings.extra_entry(module_key)
            yield Problem(
                class_key if problem.startswith("no class") else module_key,
                f"storage plugin {show_name(name)}: {problem}",
                f"{show_name(module_key)} and .class_name of a class that is installed",
                f"correct {entry.place}; LMCache would start without the plugin",
            )


def _import_problem(module: Any, class_name: Any) -> str:
    if not module:
        return "no module_path"
    if not class_name:
        return "no class_name"
    if not isinstance(module, str) or not isinstance(class_name, str):
        return "module_path or class_name is not a text"
    shown = show(module, kind="name")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        is_it = f"{module}.".startswith(f"{missing}.")
        at_fault = "" if is_it else f": it needs {show(missing, kind='name')}"
        return f"no module {shown}{at_fault}"
    except Exception as error:
        return f"module {shown} can't be imported ({type(error).__name__})"
    if not isinstance(getattr(imported, class_name, None), type):
        return f"no class {show(class_name, kind='name')} in {shown}"
    return ""
