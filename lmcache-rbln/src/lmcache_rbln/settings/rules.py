# SPDX-License-Identifier: Apache-2.0
"""What settings must be together, with RBLN, and with vLLM's own settings."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterator
from typing import Any
import copy
import importlib

# Local
from . import own, table
from .masking import show, show_name
from .places import CONNECTOR, EXTRA, Problem, Settings

#: The problem of chunks that do not hold whole blocks.
CHUNK_AND_BLOCK = "chunk_size, block_size"
#: Where the storage plugin for RDS lives.
RDS_MODULE = "lmcache_rbln.storage_plugin.rds_backend"
# Settings of which any keeps chunks somewhere.
_TIERS = (
    *("local_cpu", "local_disk", "remote_url"),
    *("storage_plugins", "remote_storage_plugins"),
)


def problems(settings: Settings, block_size: int | None) -> list[Problem]:
    """Find settings that LMCache accepts and that do not work.

    Args:
        settings: The settings. The storage plugins that they name are imported.
        block_size: vLLM's block size in tokens; None if it is not known.
    """
    return [
        *_off(settings),
        *_chunk(settings, block_size),
        *_tiers(settings),
        *_unloadable_plugins(settings),
        *_extra(settings),
    ]


def fitting_chunk_size(chunk_size: int, block_size: int) -> int:
    """Return the smallest whole number of blocks that holds what was asked for.

    Args:
        chunk_size: LMCache's chunk size as it was set, in tokens.
        block_size: vLLM's block size, in tokens; 1 or more.
    """
    return max(1, -(-chunk_size // block_size)) * block_size


def plugins(settings: Settings) -> dict[str, Any]:
    """Return the module of each storage plugin that is named."""
    return {
        str(name): settings.extra.get(f"storage_plugin.{name}.module_path")
        for name in settings.values["storage_plugins"] or ()
    }


def own_problems(key: str, value: Any, place: str) -> Iterator[Problem]:
    """Find what is wrong with one of the ``lmcache_rbln.*`` or ``rds_*`` settings."""
    # Local
    from lmcache_rbln.storage_plugin.rds.settings import read_settings

    try:
        own.Settings.parse({key: value})
        read_settings({key: value})
    except ValueError as error:
        wanted = "a setting of lmcache-rbln and a value that it may have"
        yield Problem(show_name(key), str(error), wanted, f"correct {place}")


def _off(settings: Settings) -> Iterator[Problem]:
    for name, what in table.OFF.items():
        value = settings.values[name]
        if value or value == "":  # LMCache takes an empty text for a value
            found = f"{what} is not supported on RBLN"
            fix = f"unset {settings.place(name)}"
            yield Problem(name, found, f"{name} off", fix)
    for key in table.EXTRA_SWITCHES:
        value, place = settings.extra.get(key), settings.place(EXTRA)
        if isinstance(value, str):
            found = f"{key} in {place} is {show(value, kind='number')}"
            fix = f"correct it, or take {key} out of {place}"
            yield Problem(key, found, table.UNQUOTED, fix)
        elif value and key in table.EXTRA_OFF:
            found = f"{table.EXTRA_OFF[key]} is not supported on RBLN"
            fix = f"take {key} out of {place}"
            yield Problem(key, found, f"{key} off", fix)


def _chunk(settings: Settings, block: int | None) -> Iterator[Problem]:
    chunk = settings.values["chunk_size"]
    if block and chunk % block:
        found = f"LMCache's chunk size is {chunk} tokens"
        wanted = f"a multiple of vLLM's block size {block}"
        fit = fitting_chunk_size(chunk, block)
        fix = f"set {settings.place('chunk_size')} to {fit}"
        yield Problem(CHUNK_AND_BLOCK, found, wanted, fix)
    most = settings.values.get(table.MAX_TOKENS, 0)
    if 0 < most < chunk:
        where = settings.place(table.MAX_TOKENS)
        found = f"{where} is {most}, so that nothing would ever be loaded"
        wanted = f"0 (no limit), or a chunk of {chunk} tokens or more"
        yield Problem(table.MAX_TOKENS, found, wanted, f"set {where} to {chunk}")


def _tiers(settings: Settings) -> Iterator[Problem]:
    values, place = settings.values, settings.place
    cpu, cpu_size, disk_size = "local_cpu", "max_local_cpu_size", "max_local_disk_size"
    size = values[cpu_size]
    if RDS_MODULE in plugins(settings).values():
        if values[cpu] or size > 0:
            found = "RDSBackend works without LMCache's CPU tier; "
            found += f"{cpu} is {values[cpu]} and {cpu_size} {size:g}"
            fix = f"set {place(cpu)} to False and {place(cpu_size)} to 0"
            yield Problem(cpu if values[cpu] else cpu_size, found, "both off", fix)
        return
    if size == 0:
        wanted = "memory for chunks on their way to any tier but RDS, also where "
        wanted += "local_cpu is off"
        fix = f"set {place(cpu_size)} to 5.0"
        yield Problem(cpu_size, f"{place(cpu_size)} is 0", wanted, fix)
    if values["local_disk"] and not values[disk_size]:
        found = f"{place('local_disk')} is set and {disk_size} is 0, so nothing would "
        fix = f"set {place(disk_size)} to it"
        yield Problem(disk_size, f"{found}be kept there", "its size in GiB", fix)
    if not any(values[name] for name in _TIERS):
        found = "no storage tier is on, so nothing would ever be kept"
        fix = f"set {place(cpu)} to True, or configure another tier"
        yield Problem(cpu, found, "a tier", fix)


def _unloadable_plugins(settings: Settings) -> Iterator[Problem]:
    """Find storage plugins that LMCache could not make, and would go on without."""
    for name, module in plugins(settings).items():
        key = f"storage_plugin.{name}.class_name"
        class_name = settings.extra.get(key)
        try:
            getattr(importlib.import_module(module), str(class_name))
        except Exception as error:
            shown = (show(one, kind="name") for one in (class_name, module))
            found = f"storage plugin {show_name(name)}: {' of '.join(shown)} can't be "
            found += f"loaded ({type(error).__name__})"
            if isinstance(error, ModuleNotFoundError):
                found += f": no module {show(error.name, kind='name')}"
            wanted = "module_path and class_name of a class that is installed"
            yield Problem(
                show_name(key), found, wanted, f"correct {settings.place(EXTRA)}"
            )


def _extra(settings: Settings) -> Iterator[Problem]:
    """Find entries of the extra config that are wrong or misplaced."""
    has_rds = RDS_MODULE in plugins(settings).values()
    for key, value in settings.extra.items():
        wrong = list(own_problems(key, value, settings.place(EXTRA)))
        yield from wrong
        found = f"{show_name(key)} in {settings.place(EXTRA)} has no effect"
        if key.startswith("rds_") and not wrong and not has_rds:
            wanted, fix = (
                "a storage plugin RDSBackend",
                "add it (docs/rds.md), or unset",
            )
            yield Problem(key, found, wanted, f"{fix} {key}", True)
        elif key.startswith("lmcache."):
            fix = f"move it to {CONNECTOR}"
            yield Problem(show_name(key), found, f"it in {CONNECTOR}", fix)


def lmcache_problems(settings: Settings) -> list[Problem]:
    """Ask LMCache itself, which knows more of what it can't do.

    Args:
        settings: Settings in which nothing else is wrong.
    """
    # First Party
    from lmcache.v1.config import LMCacheEngineConfig

    values = {n: settings.values[n] for n in table.definitions()}
    values[EXTRA] = copy.deepcopy(settings.extra) or None
    try:
        LMCacheEngineConfig.from_dict(values).validate()
    except Exception as error:
        text = " ".join(str(error).split())[:120] or type(error).__name__
        found = f"LMCache refuses the settings: {text}"
        wanted = "settings that LMCache accepts"
        return [Problem("LMCache", found, wanted, "see the message")]
    return []
