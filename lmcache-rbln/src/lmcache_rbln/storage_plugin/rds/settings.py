# SPDX-License-Identifier: Apache-2.0
"""Settings of the RDS backend: the ``rds_*`` keys of LMCache's extra config.

:class:`RDSSettings` is the table of them, :data:`SETTINGS` the same by key. Nothing
here needs torch or LMCache.
"""

# Standard
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# First Party
from lmcache_rbln.settings.own import Setting, parse, setting, settings_of

PREFIX = "rds_"
_MIB = 1 << 20
_ONLINE_NODES = Path("/sys/devices/system/node/online")


def numa_nodes() -> list[int]:
    """Return the NUMA nodes of this machine; node 0 alone if it tells of none."""
    try:
        parts = _ONLINE_NODES.read_text(encoding="ascii").strip().split(",")
        ranges = [[int(end) for end in part.split("-")] for part in parts]
    except (OSError, ValueError):
        return [0]
    return [node for ends in ranges for node in range(ends[0], ends[-1] + 1)]


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

    buffer_size: int = setting(2048, least=1, most=1 << 20, unit="MiB")
    failure_policy: str = setting("ignore", words=("ignore", "raise"))
    max_chunks: int = setting(0, most=1 << 32)
    capacity: int = setting(0, most=1 << 32, unit="MiB")
    write_mode: str = setting("auto", words=("auto", "overlapped", "synchronous"))
    checksum: str = setting("full", words=("full", "header"))
    wait_timeout: float = setting(5.0, most=9, unit="seconds")
    numa_node: int = setting(0, most=1023, present=numa_nodes)

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
SETTINGS: Mapping[str, Setting] = settings_of(RDSSettings, PREFIX)


def read_settings(extra_config: Mapping[str, Any] | None) -> RDSSettings:
    """Read the settings from LMCache's extra config.

    Args:
        extra_config: ``LMCACHE_EXTRA_CONFIG`` as LMCache parsed it.

    Returns:
        The settings; what is not given has its default.

    Raises:
        ValueError: A key that begins with ``rds_`` is unknown, or a value is of the
            wrong type or out of range.
    """
    return parse(RDSSettings, PREFIX, extra_config)
