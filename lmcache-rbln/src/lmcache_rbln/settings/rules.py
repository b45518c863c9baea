# SPDX-License-Identifier: Apache-2.0
"""What settings must be together, with RBLN, and with vLLM's own settings."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
import copy

# Local
from . import own, table
from .chunk import fitting_chunk_size
from .masking import show, show_name
from .places import CONNECTOR, EXTRA, Settings
from .plugins import PLUGINS, RDS_MODULE, plugin_problems, plugins
from .problem import Problem

#: The problem of chunks that do not hold whole blocks.
CHUNK_AND_BLOCK = "chunk_size, block_size"
_RDS_PREFIX = "rds_"
_LMCACHE_PREFIX = "lmcache."
_MAX_TOKENS = "lmcache.max_tokens_per_load"
# Settings of which any keeps chunks somewhere.
_TIERS = ("local_cpu", "local_disk", "remote_url")


@dataclass(frozen=True)
class VllmFacts:
    """What vLLM says of itself.

    Attributes:
        block_size: Tokens of a block; None if it is not known.
        world_size: Workers that serve the model; None if it is not known.
    """

    block_size: int | None = None
    world_size: int | None = None


def problems(settings: Settings, facts: VllmFacts) -> list[Problem]:
    """Find settings that LMCache accepts and that do not work.

    Args:
        settings: The settings.
        facts: vLLM's.
    """
    found: list[Problem] = []
    for rule in _RULES:
        try:
            found.extend(rule(settings, facts))
        except KeyError as error:
            # What it asks for can't be read, and that is a problem of its own.
            if error.args[0] not in table.definitions():
                raise
    return found


def _ranges(settings: Settings, _: VllmFacts) -> Iterator[Problem]:
    for name, value in settings.values.items():
        wanted = table.out_of_range(name, value)
        if wanted:
            entry = settings.entry(name)
            found = f"{entry.where} is {show(value)}"
            yield Problem(name, found, wanted, entry.example(table.default_of(name)))


def _off(settings: Settings, _: VllmFacts) -> Iterator[Problem]:
    for name, what in table.OFF.items():
        value = settings.values.get(name)
        if value is None or (not value and value != ""):
            continue  # LMCache takes an empty text for a value
        entry = settings.entry(name)
        yield Problem(
            name,
            f"{what} is not supported on RBLN",
            f"{name} off",
            entry.set_to("False") if value is True else entry.remove(),
        )
    for key in table.EXTRA_SWITCHES:
        if key not in settings.extra:
            continue
        entry, value = settings.extra_entry(key), settings.extra[key]
        # LMCache takes every text here for true.
        if value is not None and not isinstance(value, bool):
            found = f"{entry.where} is {show(value, kind='number')}"
            yield Problem(key, found, "true or false", entry.set_to("true or false"))
        elif value and key in table.EXTRA_OFF:
            yield Problem(
                key,
                f"{table.EXTRA_OFF[key]} is not supported on RBLN",
                f"{key} off",
                entry.remove(),
            )


def _chunk(settings: Settings, facts: VllmFacts) -> Iterator[Problem]:
    chunk, block = settings.values["chunk_size"], facts.block_size
    if table.out_of_range("chunk_size", chunk):
        return
    entry = settings.entry("chunk_size")
    if block and chunk % block:
        over = (
            ", which overrides the variable and the file"
            if entry.place == CONNECTOR
            else ""
        )
        yield Problem(
            CHUNK_AND_BLOCK,
            f"LMCache's chunk size is {chunk} tokens",
            f"a multiple of vLLM's block size {block}",
            entry.set_to(fitting_chunk_size(chunk, block)) + over,
        )
    most = settings.values.get(_MAX_TOKENS) or 0
    if 0 < most < chunk:
        entry = settings.entry(_MAX_TOKENS)
        yield Problem(
            _MAX_TOKENS,
            f"{entry.where} is {most}, so that nothing would ever be loaded",
            f"0 (no limit), or a chunk of {chunk} tokens or more",
            entry.set_to(chunk),
        )


def _tiers(settings: Settings, _: VllmFacts) -> Iterator[Problem]:
    values = settings.values
    size, local_cpu = values["max_local_cpu_size"], values["local_cpu"]
    size_entry = settings.entry("max_local_cpu_size")
    if RDS_MODULE in plugins(settings).values():
        if local_cpu or size > 0:
            yield Problem(
                "local_cpu" if local_cpu else "max_local_cpu_size",
                "RDSBackend works without LMCache's CPU tier; local_cpu is "
                f"{local_cpu} and max_local_cpu_size {size:g}",
                "both off",
                f"{settings.entry('local_cpu').set_to('False')} and "
                f"{size_entry.set_to(0)}",
            )
        return
    if size == 0:
        # The memory of every tier but RDS's own.
        yield Problem(
            "max_local_cpu_size",
            f"{size_entry.where} is 0",
            "memory for chunks on their way to any tier but RDS, also where local_cpu "
            "is off",
            size_entry.set_to("5.0"),
        )
    if values.get("local_disk") and not values["max_local_disk_size"]:
        entry = settings.entry("max_local_disk_size")
        yield Problem(
            "max_local_disk_size",
            f"{settings.entry('local_disk').where} is set and max_local_disk_size is "
            "0, so nothing would be kept there",
            "its size in GiB",
            entry.set_to("SIZE"),
        )
    named = [name for name in (*_TIERS, *PLUGINS) if values[name]]
    if not named:
        yield Problem(
            "local_cpu",
            "no storage tier is on, so nothing would ever be kept",
            "a tier",
            f"{settings.entry('local_cpu').set_to('True')}, or configure another tier",
        )


def _extra(settings: Settings, _: VllmFacts) -> Iterator[Problem]:
    """Find entries of the extra config that are wrong or misplaced."""
    # Local
    from lmcache_rbln.storage_plugin.rds.settings import read_settings

    has_rds = RDS_MODULE in plugins(settings).values()
    for key, value in settings.extra.items():
        entry = settings.extra_entry(key)
        shown = show(value, (), "number")
        if key.startswith(own.PREFIX):
            yield from own_problems(key, value, entry.place)
        elif key.startswith(_RDS_PREFIX):
            try:
                read_settings({key: value})
            except ValueError as error:
                # What it got may be a secret.
                said, must, wanted = (
                    str(error).split(", got ")[0].partition(" must be ")
                )
                yield Problem(
                    key,
                    f"{entry.where} is {shown}" if must else f"{said} ({entry.place})",
                    wanted or "a setting of the RDS backend",
                    f"correct {entry.place}",
                )
                continue
            if not has_rds:
                yield Problem(
                    key,
                    f"{entry.where} has no effect",
                    "a storage plugin RDSBackend",
                    "add the plugin (docs/rds.md), or take it out",
                    harmless=True,
                )
        elif key.startswith(_LMCACHE_PREFIX):
            yield Problem(
                key,
                f"{entry.where} has no effect",
                f"it in {CONNECTOR}",
                f"move it to {CONNECTOR}",
            )


def own_problems(key: str, value: Any, place: str) -> Iterator[Problem]:
    """Find what is wrong with one of the ``lmcache_rbln.*`` settings."""
    try:
        own.Settings.parse({key: value})
    except ValueError as error:
        yield Problem(
            show_name(key),
            str(error),
            "a setting of lmcache-rbln",
            f"correct {place}",
        )


def _ranks(settings: Settings, facts: VllmFacts) -> Iterator[Problem]:
    for name in ("lookup_server_worker_ids", "lmcache_worker_ids"):
        ranks, size = settings.values[name], facts.world_size
        if ranks and size and not all(0 <= rank < size for rank in ranks):
            entry = settings.entry(name)
            yield Problem(
                name,
                f"{entry.where} is {show(ranks)}",
                f"ranks from 0 to {size - 1}",
                entry.remove(),
            )


def _combinations(settings: Settings, _: VllmFacts) -> Iterator[Problem]:
    values = settings.values
    is_remote = values["remote_url"] or values["remote_storage_plugins"]
    if is_remote and values["remote_serde"] is None:
        entry = settings.entry("remote_serde")
        yield Problem(
            "remote_serde",
            f"{entry.where} is None, and a remote tier is on",
            " or ".join(table.WORDS["remote_serde"]),
            entry.example(table.default_of("remote_serde")),
        )


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
        text = " ".join(str(error).split())[:120]
        return [
            Problem(
                "LMCache",
                f"LMCache refuses the settings: {text or type(error).__name__}",
                "settings that LMCache accepts",
                "see the message",
            )
        ]
    return []


_Rule = Callable[[Settings, VllmFacts], Iterator[Problem]]
_RULES: tuple[_Rule, ...] = (
    _ranges,
    _off,
    _chunk,
    _tiers,
    lambda settings, _: plugin_problems(settings),
    _extra,
    _ranks,
    _combinations,
)
