# SPDX-License-Identifier: Apache-2.0
"""Settings of the RDS backend: the ``rds_*`` keys of LMCache's extra config."""

# Standard
from collections.abc import Mapping
from dataclasses import dataclass
import difflib
from typing import Any

PREFIX = "rds_"
FAILURE_POLICIES = ("ignore", "raise")
WRITE_MODES = ("auto", "overlapped", "synchronous")
CHECKSUMS = ("full", "header")
_MIB = 1 << 20


class RDSSettingsError(ValueError):
    """A setting that cannot be used; the message names it."""


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

    buffer_size: int = 2048
    failure_policy: str = "ignore"
    max_chunks: int = 0
    capacity: int = 0
    write_mode: str = "auto"
    checksum: str = "full"
    wait_timeout: float = 5.0
    numa_node: int = 0

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


# Key without prefix -> what it must be: a range of numbers, or a choice of words.
_INTEGERS = {
    "buffer_size": (1, 1 << 20),
    "max_chunks": (0, 1 << 32),
    "capacity": (0, 1 << 32),
    "numa_node": (0, 1023),
}
_SECONDS = {"wait_timeout": (0.0, 9.0)}
_WORDS = {
    "failure_policy": FAILURE_POLICIES,
    "write_mode": WRITE_MODES,
    "checksum": CHECKSUMS,
}
_KNOWN = (*_INTEGERS, *_SECONDS, *_WORDS)


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
        name = key.removeprefix(PREFIX)
        if name not in _KNOWN:
            raise RDSSettingsError(_unknown(key))
        given[name] = _checked(key, name, value)
    return RDSSettings(**given)


def _unknown(key: str) -> str:
    known = [PREFIX + name for name in _KNOWN]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return (
        f"{key} is not a setting of the RDS backend; did you mean {close[0]}? "
        f"Known: {', '.join(sorted(known))}"
    )


def _checked(key: str, name: str, value: Any) -> Any:
    if name in _WORDS:
        words = _WORDS[name]
        if value not in words:
            raise RDSSettingsError(
                f"{key} must be one of {', '.join(words)}, got {value!r}"
            )
        return value
    if name in _SECONDS:
        low, high = _SECONDS[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RDSSettingsError(f"{key} must be a number of seconds, got {value!r}")
        if not low <= value <= high:
            raise RDSSettingsError(
                f"{key} must be from {low:g} to {high:g} seconds, got {value!r}"
            )
        return float(value)
    least, most = _INTEGERS[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise RDSSettingsError(f"{key} must be a whole number, got {value!r}")
    if not least <= value <= most:
        raise RDSSettingsError(f"{key} must be from {least} to {most}, got {value!r}")
    return value
