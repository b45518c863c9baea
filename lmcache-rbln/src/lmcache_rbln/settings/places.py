# SPDX-License-Identifier: Apache-2.0
"""The places where settings stand, and which of them wins.

A variable (``LMCACHE_*``) overrides the configuration file, and vLLM's
``kv_connector_extra_config`` (``lmcache.*``) overrides both. The extra config is one
setting: the one that wins replaces the others as a whole.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
import re

# Local
from . import names, table
from .masking import show_name
from .problem import Problem

CONNECTOR = "kv_connector_extra_config"
EXTRA = "extra_config"
_PREFIX = "LMCACHE_"
_CONNECTOR_PREFIX = "lmcache."
#: Settings of LMCacheMPConnector, which has a server.
SERVER_PREFIX = "lmcache.mp."
# Kubernetes gives a pod such variables for every service, also for one of LMCache's.
_SERVICE_NAME = re.compile(
    r".*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
)
_SERVICE_PORT = re.compile(r"(tcp|udp|sctp)://\S+")
_SWITCH = "true or false, without quotes"


@dataclass(frozen=True)
class Entry:
    """A setting where it stands.

    Attributes:
        label: What the user knows it by.
        place: The place, for what stands in an object there; empty for a variable.
        value: What stands there, for LMCache's converter.
    """

    label: str
    place: str = ""
    value: Any = None

    @property
    def where(self) -> str:
        """The setting and its place."""
        return f"{self.label} in {self.place}" if self.place else self.label

    def set_to(self, value: object) -> str:
        """Return how to give it another value."""
        if not self.place:
            return f"set {self.label}={value}"
        return f"set {self.label} to {value} in {self.place}"

    def example(self, value: object) -> str:
        """Return how to give it a value that works, or none if there is no such."""
        if value is None or value == float("inf"):
            return f"correct it, or {self.remove()}"
        return f"{self.set_to(value)}, for example"

    def remove(self) -> str:
        """Return how to take it away."""
        if not self.place:
            return f"unset {self.label}"
        return f"take {self.label} out of {self.place}"


@dataclass
class Settings:
    """What the places say together.

    Attributes:
        entries: The entry that holds, by setting.
        values: What LMCache makes of it; without those that it can't read.
        extra: The extra config that holds.
        extra_place: Where that stands.
        problems: What is wrong with the entries by themselves.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    extra_place: str = f"{_PREFIX}EXTRA_CONFIG"
    problems: list[Problem] = field(default_factory=list)

    def entry(self, name: str) -> Entry:
        """Return where a setting stands, or the variable to set if it is a default."""
        return self.entries.get(name) or Entry(_PREFIX + name.upper())

    def extra_entry(self, key: str) -> Entry:
        """Return where an entry of the extra config stands."""
        return Entry(show_name(key), self.extra_place, self.extra.get(key))


def gather(
    environment: Mapping[str, str],
    connector: Mapping[str, Any],
    file_entries: Mapping[Any, Any] | None = None,
    file: str = "",
) -> Settings:
    """Gather the settings of all places; defaults where none names them.

    Args:
        environment: The environment.
        connector: vLLM's ``kv_connector_extra_config``.
        file_entries: What the configuration file holds.
        file: Its name.
    """
    settings = Settings()
    settings.values = {
        name: definition["default"] for name, definition in table.definitions().items()
    }
    for name, entry in (
        *_of_file(settings, file_entries or {}, file),
        *_of_environment(settings, environment),
        *_of_connector(settings, connector),
    ):
        reading = table.read(name, entry.value)
        if reading.wanted:
            settings.values.pop(name, None)
            settings.problems.append(_malformed(name, entry, reading.wanted))
        else:
            settings.values[name] = reading.value
            if name == EXTRA:
                _replace_extra(settings, entry, reading.value or {})
        settings.entries[name] = entry
    return settings


def _of_file(
    settings: Settings, entries: Mapping[Any, Any], file: str
) -> Iterator[tuple[str, Entry]]:
    for key, value in entries.items():
        name = table.aliases().get(key, key) if isinstance(key, str) else key
        entry = Entry(show_name(key), file, value)
        if isinstance(name, str) and name in table.definitions():
            yield name, entry
        elif not isinstance(name, str):
            settings.problems.append(
                Problem(
                    show_name(key),
                    f"{file} has the entry {show_name(key)}",
                    "names of settings",
                    entry.remove(),
                )
            )
        elif name != "ec" and not name.startswith("ec_"):
            # Those are LMCache's for another cache.
            settings.problems.append(_unknown(name, entry, names.supported()))


def _of_environment(
    settings: Settings, environment: Mapping[str, str]
) -> Iterator[tuple[str, Entry]]:
    # First Party
    from lmcache.v1.config_base import _parse_quoted_string

    settings_of = {_PREFIX + n.upper(): n for n in table.definitions()}
    settings_of |= {_PREFIX + old.upper(): new for old, new in table.aliases().items()}
    for variable in sorted(v for v in environment if v.startswith(_PREFIX)):
        if _SERVICE_NAME.fullmatch(variable) or (
            variable.endswith("_PORT") and _SERVICE_PORT.match(environment[variable])
        ):
            continue
        entry = Entry(variable, "", _parse_quoted_string(environment[variable]))
        if variable in settings_of:
            if not table.is_unset(settings_of[variable], entry.value):
                yield settings_of[variable], entry
            continue
        if names.is_variable_of_lmcache(variable):
            continue
        if variable.removeprefix(_PREFIX).lower() == "max_tokens_per_load":
            settings.problems.append(_only_in_connector(entry, variable))
            continue
        candidates = names.supported_variables()
        settings.problems.append(_unknown(variable, entry, candidates))


def _of_connector(
    settings: Settings, connector: Mapping[str, Any]
) -> Iterator[tuple[str, Entry]]:
    for key, value in connector.items():
        entry = Entry(show_name(key), CONNECTOR, value)
        if not isinstance(key, str):
            continue
        name = key.removeprefix(_CONNECTOR_PREFIX)
        if key.startswith(SERVER_PREFIX):
            settings.problems.append(
                Problem(
                    key,
                    f"{entry.where} is for LMCacheMPConnector",
                    "no server: RBLNLMCacheConnectorV1 has none",
                    f"{entry.remove()}, or use LMCacheMPConnector",
                    harmless=True,
                )
            )
        elif name != key and name in table.definitions():
            yield name, entry
        elif key in table.CONNECTOR_NUMBERS or key in table.CONNECTOR_SWITCHES:
            limits = table.CONNECTOR_NUMBERS.get(key)
            # LMCache takes them as they are.
            reading = (
                table.read_number(value, limits)
                if limits
                else table.Reading(value, "" if isinstance(value, bool) else _SWITCH)
            )
            if reading.wanted:
                settings.problems.append(_malformed(key, entry, reading.wanted))
            else:
                settings.values[key] = reading.value
                settings.entries[key] = entry
        elif name != key and names.is_internal(name):
            settings.problems.append(
                Problem(
                    show_name(key),
                    f"{entry.where} would replace a part of LMCache",
                    "names of settings",
                    entry.remove(),
                )
            )
        elif name != key:
            candidates = [
                _CONNECTOR_PREFIX + n
                for n in (*names.supported(), "max_tokens_per_load")
            ]
            settings.problems.append(_unknown(key, entry, candidates))
        elif key.startswith(("rds_", "storage_plugin.", "remote_storage_plugin.")) or (
            key in table.EXTRA_SWITCHES
        ):
            settings.problems.append(
                Problem(
                    key,
                    f"{entry.where} has no effect",
                    "it in LMCache's extra config",
                    f"move {key} into LMCACHE_EXTRA_CONFIG, or into "
                    f'"lmcache.extra_config" of {CONNECTOR}',
                )
            )
        elif key in table.definitions():
            settings.problems.append(
                Problem(
                    key,
                    f"{entry.where} has no effect",
                    f"{_CONNECTOR_PREFIX}{key}",
                    f"rename it to {_CONNECTOR_PREFIX}{key}",
                )
            )


def _replace_extra(settings: Settings, entry: Entry, extra: dict[str, Any]) -> None:
    place = entry.where
    lost = [show_name(key) for key in settings.extra if key not in extra]
    if lost:
        settings.problems.append(
            Problem(
                EXTRA,
                f"{place} replaces {settings.extra_place} as a whole, so there "
                f"{', '.join(lost[:5])} has no effect",
                "one extra config",
                f"move all entries into {place}",
                harmless=True,
            )
        )
    settings.extra = {str(key): value for key, value in extra.items()}
    settings.extra_place = place


def _malformed(name: str, entry: Entry, wanted: str) -> Problem:
    shown = table.show_setting(name.removeprefix(_CONNECTOR_PREFIX), entry.value)
    return Problem(
        name,
        f"{entry.where} is {shown}",
        wanted,
        entry.example(table.default_of(name)),
    )


def _only_in_connector(entry: Entry, variable: str) -> Problem:
    name = f"{_CONNECTOR_PREFIX}max_tokens_per_load"
    return Problem(
        variable,
        f"{entry.where} has no effect",
        f"{name} in {CONNECTOR}",
        f"set {name} there",
    )


def _unknown(name: str, entry: Entry, candidates: Iterable[str]) -> Problem:
    """Say that LMCache does not read a name, and which was meant.

    A name like no other is harmless: it is another program's or another version's.

    Args:
        name: The name.
        entry: Where it stands.
        candidates: Names that have an effect there.
    """
    found = f"{entry.where} is not a name that LMCache reads"
    meant = names.meant(name, candidates)
    if meant:
        return Problem(show_name(name), found, meant, f"rename it to {meant}")
    fix = entry.remove()
    return Problem(
        show_name(name),
        found,
        "names that LMCache reads",
        fix if entry.place else f"{fix}, unless another program reads it",
        harmless=True,
    )
