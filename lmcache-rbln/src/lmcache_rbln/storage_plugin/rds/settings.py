# SPDX-License-Identifier: Apache-2.0
"""Settings of the RDS backend: the ``rds_*`` keys of LMCache's extra config.

:class:`RDSSettings` is the table of them, :data:`SETTINGS` the same by key. Nothing
here needs torch or LMCache.
"""

# Standard
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
import difflib

PREFIX = "rds_"
_MIB = 1 << 20
_ONLINE_NODES = Path("/sys/devices/system/node/online")


class RDSSettingsError(ValueError):
    """A setting that cannot be used; the message names it."""


@dataclass(frozen=True)
class Setting:
    """What one key may be.

    Attributes:
        default: Its value where it is not given; its type is that of all values. A
            whole number is a ``float`` too.
        least: Smallest number.
        most: Largest number.
        unit: Unit of the number.
        words: All words that may be given, where it is no number.
        present: Returns the numbers that this machine has, where that is less than the
            range.
    """

    default: int | float | str
    least: float = 0
    most: float = 0
    unit: str = ""
    words: tuple[str, ...] = ()
    present: Callable[[], list[int]] | None = None

    def wanted(self, value: Any) -> str:
        """Return what a value must be instead, or an empty text if it may be so."""
        if self.words:
            return "" if value in self.words else "one of " + ", ".join(self.words)
        kinds = (int, float) if isinstance(self.default, float) else (int,)
        unit = f" {self.unit}" if self.unit else ""
        if isinstance(value, bool) or not isinstance(value, kinds):
            return f"a number of{unit}" if float in kinds else "a whole number"
        if not self.least <= value <= self.most:
            return f"from {self.least:.12g} to {self.most:.12g}{unit}"
        if self.present is not None and value not in (there := self.present()):
            return "one that this machine has: " + ", ".join(map(str, there))
        return ""


def numa_nodes() -> list[int]:
    """Return the NUMA nodes of this machine; node 0 alone if it tells of none."""
    try:
        parts = _ONLINE_NODES.read_text(encoding="ascii").strip().split(",")
        ranges = [[int(end) for end in part.split("-")] for part in parts]
    except (OSError, ValueError):
        return [0]
    return [node for ends in ranges for node in range(ends[0], ends[-1] + 1)]


def _number(default: float, least: float, most: float, unit: str = "") -> Any:
    setting = Setting(default, least, most, unit)
    return field(default=default, metadata={"setting": setting})


def _word(default: str, *others: str) -> Any:
    setting = Setting(default, words=(default, *others))
    return field(default=default, metadata={"setting": setting})


@dataclass(frozen=True)
class RDSSettings:
    """What a user may choose; see the table in ``docs/rds.md``.

    Attributes:
        buffer_size: Device staging memory, in MiB.
        failure_policy: ``ignore`` serves on without the chunk, ``raise`` stops.
        max_chunks: Most chunks on the NVMe per worker; 0: no limit.
        capacity: Most NVMe space per worker, in MiB; 0: no limit.
        write_mode: ``overlapped`` with the next forward, ``synchronous``, or
            ``auto``: synchronous with more than one worker.
        checksum: ``full`` covers header and payload, ``header`` the header alone.
        wait_timeout: Longest wait for staging memory, in seconds.
        numa_node: NUMA node of the storage threads.
    """

    buffer_size: int = _number(2048, 1, 1 << 20, "MiB")
    failure_policy: str = _word("ignore", "raise")
    max_chunks: int = _number(0, 0, 1 << 32)
    capacity: int = _number(0, 0, 1 << 32, "MiB")
    write_mode: str = _word("auto", "overlapped", "synchronous")
    checksum: str = _word("full", "header")
    wait_timeout: float = _number(5.0, 0, 9, "seconds")
    numa_node: int = field(
        default=0, metadata={"setting": Setting(0, 0, 1023, present=numa_nodes)}
    )

    @property
    def buffer_bytes(self) -> int:
        """``buffer_size`` in bytes."""
        return self.buffer_size * _MIB

    @property
    def capacity_bytes(self) -> int:
        """``capacity`` in bytes."""
        return self.capacity * _MIB

    def overlaps(self, world_size: int) -> bool:
        """Tell whether writes overlap the next forward.

        Args:
            world_size: Number of workers that serve the model.
        """
        if self.write_mode == "auto":
            return world_size == 1
        return self.write_mode == "overlapped"


#: What each key may be.
SETTINGS: Mapping[str, Setting] = {
    PREFIX + entry.name: entry.metadata["setting"] for entry in fields(RDSSettings)
}


def read_settings(extra_config: Mapping[str, Any] | None) -> RDSSettings:
    """Read the settings from LMCache's extra config.

    Args:
        extra_config: ``LMCACHE_EXTRA_CONFIG`` as LMCache parsed it.

    Returns:
        The settings; what is not given has its default.

    Raises:
        RDSSettingsError: A key that begins with ``rds_`` is unknown, or a value is of
            the wrong type or out of range.
    """
    given: dict[str, Any] = {}
    for key, value in (extra_config or {}).items():
        if not key.startswith(PREFIX):
            continue
        if key not in SETTINGS:
            close = difflib.get_close_matches(key, SETTINGS, n=1, cutoff=0.0)
            raise RDSSettingsError(
                f"{key} is not a setting of the RDS backend; did you mean {close[0]}? "
                f"Known: {', '.join(sorted(SETTINGS))}"
            )
        setting = SETTINGS[key]
        wanted = setting.wanted(value)
        if wanted:
            raise RDSSettingsError(f"{key} must be {wanted}, got {value!r}")
        given[key.removeprefix(PREFIX)] = type(setting.default)(value)
    return RDSSettings(**given)
