# SPDX-License-Identifier: Apache-2.0
"""The settings of RBLN transfers: environment variables, read in one place."""

# Future
from __future__ import annotations

# Standard
import functools
import os

#: Pinned host memory for staging, of a process, in MiB.
STAGING_ENV_VAR = "LMCACHE_RBLN_STAGING_MIB"
DEFAULT_STAGING_MIB = 64
#: One buffer, and more than transfers can make use of: eight of them with two buffers
#: each take 128.
STAGING_MIB_RANGE = (8, 4096)

#: Threads of one transfer that transpose, the calling one included.
THREADS_ENV_VAR = "LMCACHE_RBLN_TRANSPOSE_THREADS"
#: More than this hardly helps: a few cores use all of the memory's bandwidth.
MAX_DEFAULT_THREADS = 4
#: More threads than any machine has memory bandwidth for.
THREADS_RANGE = (1, 64)

#: Of a value that is refused, a message shows so many characters.
_SHOWN = 40


def require_valid() -> None:
    """Read every setting.

    Raises:
        ValueError: One is not as its function says; the message names it.
    """
    staging_mib()
    transpose_threads()


def staging_mib() -> int:
    """Return how many MiB of pinned host memory transfers may use for staging.

    Returns:
        The setting ``LMCACHE_RBLN_STAGING_MIB``, by default 64.

    Raises:
        ValueError: If it is not a whole number of 8 to 4096.
    """
    mib = _whole_number(STAGING_ENV_VAR, STAGING_MIB_RANGE, "MiB", DEFAULT_STAGING_MIB)
    return DEFAULT_STAGING_MIB if mib is None else mib


@functools.cache
def transpose_threads() -> int:
    """Return how many threads transpose one transfer.

    Returns:
        The setting ``LMCACHE_RBLN_TRANSPOSE_THREADS``; by default one less than the
        CPUs that this process may use, so that copies keep one, but 1 to 4.

    Raises:
        ValueError: If it is not a whole number of 1 to 64.
    """
    threads = _whole_number(THREADS_ENV_VAR, THREADS_RANGE, "threads", 2)
    if threads is not None:
        return threads
    spare = len(os.sched_getaffinity(os.getpid())) - 1
    return max(1, min(MAX_DEFAULT_THREADS, spare))


def _whole_number(
    name: str, limits: tuple[int, int], unit: str, example: int
) -> int | None:
    """Return the value of a variable, or None if it is not set."""
    raw = os.environ.get(name, "").strip()
    if not raw:
        return None
    low, high = limits
    # The length first: int() refuses thousands of digits without the variable's name.
    digits = raw.lstrip("0") if raw.isascii() and raw.isdigit() else ""
    if not 0 < len(digits) <= len(str(high)) or not low <= int(digits) <= high:
        shown = raw if len(raw) <= _SHOWN else f"{raw[:_SHOWN]}..."
        raise ValueError(
            f"{name}={shown!r} is not a whole number of {unit} from {low} to {high}; "
            f"set for example {name}={example}"
        )
    return int(digits)
