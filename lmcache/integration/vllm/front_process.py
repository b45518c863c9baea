# SPDX-License-Identifier: Apache-2.0
"""What vLLM's front process does last, for the processes that it has started.

A connector refuses in vLLM's engine or worker process. The front process says last that
the engine has failed, under two tracebacks, and never why: here it logs the reason as
the last thing that it does. Where it stops, it kills the engine at once, unless
``--shutdown-timeout`` is set: here it removes the files of the engine's sockets.

The front process is the first to import the connector, when vLLM puts its
configuration together; the others inherit the name of a folder and leave there what it
has to know.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar
import atexit
import functools
import logging
import multiprocessing
import os
import shutil
import tempfile
import time

# First Party
from lmcache.logging import init_logger

logger = init_logger(__name__)

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

#: Names the folder; set by the front process, for itself and those that it starts. No
#: setting, so it does not begin like one.
VARIABLE = "_LMCACHE_RBLN_FRONT_FOLDER"
_PREFIX = "lmcache-rbln-front-"

#: This process, if it is the front process.
_front: int | None = None


def announce() -> None:
    """Let this process do its part when it ends, if it is the front process.

    vLLM starts the others with multiprocessing. A program that vLLM did not start is a
    front process of its own, whatever it inherited.
    """
    global _front
    if multiprocessing.parent_process() is not None or _front == os.getpid():
        return
    _front = os.getpid()
    # Nobody else can put anything there.
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    os.environ[VARIABLE] = str(folder)
    atexit.register(_end, folder, _front)


def leaves_reason(
    start: Callable[_Arguments, _Result],
) -> Callable[_Arguments, _Result]:
    """Let a step of a connector's start leave its reason when it refuses.

    Args:
        start: The step; what it raises is the reason.

    Returns:
        The step, which raises the same.
    """

    @functools.wraps(start)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return start(*args, **kwargs)
        except Exception as error:
            leave_reason(error)
            raise

    return run


def leave_reason(error: Exception) -> None:
    """Leave the reason of a refusal to the front process; an earlier one stays.

    In the front process itself the error is what its user sees anyway.

    Args:
        error: What the connector raises.
    """
    folder = os.environ.get(VARIABLE)
    if folder is None or _front == os.getpid():
        return
    path = Path(folder, "reason")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return
    with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
        file.write(" ".join(str(error).split()))


def forget_reason() -> None:
    """Remove the reason that an earlier engine has left: this one has started.

    A reason of another process of the same engine, which began together with this one,
    stays.
    """
    if (folder := os.environ.get(VARIABLE)) is None:
        return
    path = Path(folder, "reason")
    with suppress(OSError):
        began = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        ticks_per_second = os.sysconf("SC_CLK_TCK")
        own_age = (
            time.clock_gettime(time.CLOCK_BOOTTIME) - int(began) / ticks_per_second
        )
        if time.time() - path.lstat().st_mtime > own_age:
            path.unlink()


def leave_sockets(paths: Iterable[str]) -> None:
    """Leave the names of this process's sockets to the front process.

    Args:
        paths: Files of sockets that this process may bind, before it binds any. One
            that is there already is somebody else's.
    """
    if (folder := os.environ.get(VARIABLE)) is None:
        return
    names = [os.fsencode(path) + b"\n" for path in paths if not os.path.lexists(path)]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    with (
        suppress(OSError),
        open(os.open(Path(folder, "sockets"), flags, 0o600), "ab") as file,
    ):
        file.write(b"".join(names))


def _end(folder: Path, process: int) -> None:
    if os.getpid() != process:  # forked, and ended by itself
        return
    reason, sockets = (_read(folder / name) for name in ("reason", "sockets"))
    shutil.rmtree(folder, ignore_errors=True)
    for name in sockets.splitlines():
        path = Path(os.fsdecode(name))
        if path.is_socket():
            path.unlink(missing_ok=True)
    if reason:
        # What other packages still log while the process ends must not follow it.
        text = reason.decode(errors="replace")
        logger.error("LMCache refused to start: %s", text)
        logging.disable()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
