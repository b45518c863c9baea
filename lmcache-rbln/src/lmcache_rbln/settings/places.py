# SPDX-License-Identifier: Apache-2.0
"""The places where settings stand, and which of them wins.

A variable (``LMCACHE_*``) overrides the configuration file, and vLLM's
``kv_connector_extra_config`` (``lmcache.*``) overrides both. The extra config is one
setting: the one that wins replaces the others as a whole.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
import difflib
import re

# Local
from . import table
from .masking import show, show_name

CONNECTOR = "kv_connector_extra_config"
EXTRA = "extra_config"
FILE = "LMCACHE_CONFIG_FILE"
_VARIABLE = "LMCACHE_"
_KEY = "lmcache."
# How entries of the extra config begin.
_EXTRA_FAMILIES = ("rds_", "storage_plugin.", "remote_storage_plugin.")
# How alike a name must be to be taken for a misspelling: a slip of a letter or two.
_ALIKE = 0.9
# Kubernetes gives a pod such variables for every service, also for one of LMCache's.
_KUBERNETES = re.compile(
    r"LMCACHE_(\w+_)?(SERVICE_(HOST|PORT)\w*=|PORT_\d+_\w+=|PORT=(tcp|udp|sctp)://)"
)


@dataclass(frozen=True)
class Problem:
    """A setting that does not do what it says.

    Attributes:
        setting: Its name, without the place where it stands.
        found: What stands there, without secrets.
        wanted: What should.
        fix: What to do, with the name of the place.
        harmless: Whether serving works all the same, without the setting.
    """

    setting: str
    found: str
    wanted: str
    fix: str
    harmless: bool = False

    def __str__(self) -> str:
        return f"{self.found}, wanted {self.wanted}; {self.fix}"


@dataclass
class Settings:
    """What the places say together.

    Attributes:
        where: What the user knows a setting by that is not left at its default: its
            name, with its place unless that is the environment.
        values: What LMCache makes of it; the default for what it can't read.
        extra: The extra config that holds.
        problems: What is wrong with the entries by themselves.
    """

    where: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, name: str) -> str:
        """Return where a setting stands, or the variable to set if it is a default."""
        return self.where.get(name, _VARIABLE + name.upper())

    def put(self, name: str, where: str, value: Any) -> None:
        """Take a setting of LMCache's from a place, and note what is wrong with it."""
        converted, wanted = table.read(name, value)
        self.where[name], self.values[name] = where, converted
        if wanted:
            default = table.definitions()[name]["default"]
            fix = f"correct it, or unset {where}"
            if default is not None and default != float("inf"):
                fix = f"set {where} to {default}, for example"
            found = f"{where} is {table.show_setting(name, value)}"
            self.problems.append(Problem(name, found, wanted, fix))
        elif name == EXTRA:
            self.extra = {str(key): one for key, one in (converted or {}).items()}

    def note_unknown(self, name: str, where: str, spelling: str) -> None:
        """Note that LMCache does not read a name, and which was meant.

        A name like no other is harmless: it is another program's or another version's.

        Args:
            name: The name in lower case, without what all names begin with there.
            where: The name where it stands.
            spelling: What names begin with there.
        """
        found = f"{where} is not a name that LMCache reads"
        candidates = table.effective()
        if spelling == _VARIABLE:
            candidates += table.VARIABLES
        near = difflib.get_close_matches(name, candidates, 1, _ALIKE)
        if not near:
            fix = f"unset {where}, unless another program reads it"
            wanted = "names that LMCache reads"
            self.problems.append(Problem(where, found, wanted, fix, True))
            return
        meant = spelling + (near[0].upper() if spelling == _VARIABLE else near[0])
        if _KEY + near[0] == table.MAX_TOKENS:
            meant = f"{table.MAX_TOKENS} in {CONNECTOR}"
        self.problems.append(Problem(where, found, meant, f"rename it to {meant}"))


def gather(environment: Mapping[str, str], connector: Mapping[str, Any]) -> Settings:
    """Gather the settings of all places; defaults where none names them.

    Args:
        environment: The environment, which names the configuration file.
        connector: vLLM's ``kv_connector_extra_config``.
    """
    settings = Settings()
    settings.values = {n: one["default"] for n, one in table.definitions().items()}
    if FILE in environment:
        _put_file(settings, environment[FILE])
    _put_variables(settings, environment)
    for key, value in connector.items():
        _put_key(settings, key, value)
    return settings


def _put_file(settings: Settings, file: str) -> None:
    # Third Party
    import yaml

    why = "it holds no mapping"
    entries = None
    try:
        # LMCache reads it once in each process, which a pipe can't give.
        if Path(file).exists() and not Path(file).is_file():
            raise OSError(0, "not a file")
        entries = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        # What YAML says quotes the file, which may hold secrets.
        why = getattr(error, "strerror", None) or "it can't be parsed as YAML"
        if mark := getattr(error, "problem_mark", None):
            why += f" at line {mark.line + 1} column {mark.column + 1}"
    if not isinstance(entries, dict):
        wanted = "a YAML file with one mapping of settings"
        fix = f"correct the file, or unset {FILE}"
        settings.problems.append(Problem(FILE, f"{FILE}={file}: {why}", wanted, fix))
        return
    for key, value in entries.items():
        name, where = table.aliases().get(key, str(key)), f"{show_name(key)} in {file}"
        if name in table.definitions():
            settings.put(name, where, value)
        elif name != "ec" and not name.startswith("ec_"):
            # Those are LMCache's for another cache.
            settings.note_unknown(name, where, "")


def _put_variables(settings: Settings, environment: Mapping[str, str]) -> None:
    # First Party
    from lmcache.v1.config_base import _parse_quoted_string

    for variable in sorted(v for v in environment if v.startswith(_VARIABLE)):
        if _KUBERNETES.match(f"{variable}={environment[variable]}"):
            continue
        value = _parse_quoted_string(environment[variable])
        name = variable.removeprefix(_VARIABLE).lower()
        name = table.aliases().get(name, name)
        if name in table.definitions():
            if not table.says_nothing(name, value):
                settings.put(name, variable, value)
        elif not table.is_variable_of_lmcache(variable):
            settings.note_unknown(name, variable, _VARIABLE)


def _put_key(settings: Settings, key: str, value: Any) -> None:
    """Take an entry of ``kv_connector_extra_config``."""
    name, where = key.removeprefix(_KEY), f"{show_name(key)} in {CONNECTOR}"
    move = ""
    if kind := table.CONNECTOR_KEYS.get(key):
        settings.where[key] = where
        if type(value) is kind and value >= 0:
            settings.values[key] = value
        else:
            found = f"{where} is {show(value, kind='number')}"
            wanted = table.UNQUOTED if kind is bool else "a whole number from 0"
            fix = f"correct it, or unset {where}"
            settings.problems.append(Problem(key, found, wanted, fix))
    elif name != key and name in table.definitions():
        settings.put(name, where, value)
    elif name != key and table.is_part_of_lmcache(name):
        found, wanted = f"{where} would replace a part of LMCache", "names of settings"
        fix = f"unset {where}"
        settings.problems.append(Problem(show_name(key), found, wanted, fix))
    elif name != key:
        settings.note_unknown(name, where, _KEY)
    elif key.startswith(_EXTRA_FAMILIES) or key in table.EXTRA_SWITCHES:
        move = f'LMCACHE_EXTRA_CONFIG, or "{_KEY}{EXTRA}" of {CONNECTOR}'
    elif key in table.definitions():
        move = f"{_KEY}{key}"
    if move:
        found, wanted = f"{where} has no effect", f"it in {move}"
        settings.problems.append(Problem(key, found, wanted, f"move it to {move}"))
