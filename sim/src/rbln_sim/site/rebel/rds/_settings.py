# SPDX-License-Identifier: Apache-2.0
"""``RBLN_SIM_RDS_*``, read once."""

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from ._faults import schedule_of

UNIT = 4096
_DEFAULT_GIB = 16.0
_MAX_GIB = 1024.0


@dataclass(frozen=True)
class Settings:
    """What the simulated storage is like.

    Attributes:
        file: Holds its bytes.
        capacity: Its size in bytes; 0: there is no storage service.
        faults: What goes wrong, and when; see :func:`schedule_of`.
        seed: Of faults by probability.
        deferred: When operations on a stream run: ``latest``, ``earliest`` or a seed;
            empty: as soon as they can, in threads.
    """

    file: Path
    capacity: int
    faults: str
    seed: int
    deferred: str


def _state_dir() -> Path:
    # As the runtime does (csrc/settings.cpp).
    if folder := os.environ.get("RBLN_SIM_STATE_DIR"):
        return Path(folder)
    if folder := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(folder) / "rbln-sim"
    return Path(f"/tmp/rbln-sim-{os.getuid()}")


def _capacity() -> int:
    text = os.environ.get("RBLN_SIM_RDS_GIB", "")
    try:
        gib = float(text or _DEFAULT_GIB)
    except ValueError:
        gib = -1.0
    if not 0 <= gib <= _MAX_GIB:
        raise ValueError(
            f"RBLN_SIM_RDS_GIB='{text}' is not a number of GiB from 0 to {_MAX_GIB:g}"
        )
    return int(gib * 2**30) // UNIT * UNIT


@functools.cache
def settings() -> Settings:
    """Return the settings of this process.

    Raises:
        ValueError: One cannot be read; the message names it.
    """
    file = os.environ.get("RBLN_SIM_RDS_FILE")
    faults = os.environ.get("RBLN_SIM_RDS_FAULTS", "")
    # These two are checked by the runtime, which has read them before.
    deferred = os.environ.get("RBLN_SIM_DEFERRED", "").removeprefix("0")
    seed = int(os.environ.get("RBLN_SIM_SEED") or 0)
    schedule_of(faults, seed)
    return Settings(
        file=Path(file) if file else _state_dir() / "rds.img",
        capacity=_capacity(),
        faults=faults,
        seed=seed,
        deferred=deferred,
    )
