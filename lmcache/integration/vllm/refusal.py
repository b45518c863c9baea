# SPDX-License-Identifier: Apache-2.0
"""Makes the reason of a refused start the last line of the log.

A connector refuses in vLLM's engine or worker process. vLLM's front process says last
that the engine has failed, under two tracebacks, and never why. So the refusing process
leaves its reason in a file, and the front process logs it as the last thing that it
does. The front process is the first to import the connector, when vLLM puts its
configuration together; the others inherit the file's name.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar
import atexit
import functools
import logging
import multiprocessing
import os
import shutil
import tempfile

# First Party
from lmcache.logging import init_logger

logger = init_logger(__name__)

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

#: Names the file; set by the front process, for itself and those that it starts.
VARIABLE = "LMCACHE_RBLN_REFUSAL_FILE"
_PREFIX = "lmcache-rbln-refusal-"

#: This process, if it is the one that logs refusals.
_front: int | None = None


def announce_in_front_process() -> None:
    """Let this process log a refusal when it ends, if it is the front process.

    vLLM starts the others with multiprocessing. A program that vLLM did not start is a
    front process of its own, whatever it inherited.
    """
    global _front
    if multiprocessing.parent_process() is not None or _front == os.getpid():
        return
    _front = os.getpid()
    # Nobody else can put anything there.
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    os.environ[VARIABLE] = str(folder / "reason")
    atexit.register(_announce, folder, _front)


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
            leave(error)
            raise

    return run


def leave(error: Exception) -> None:
    """Leave the reason of a refusal to the front process; an earlier one stays.

    In the front process itself the error is what its user sees anyway.

    Args:
        error: What the connector raises.
    """
    path = os.environ.get(VARIABLE)
    if path is None or _front == os.getpid():
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return
    with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
        file.write(" ".join(str(error).split()))


def _announce(folder: Path, process: int) -> None:
    if os.getpid() != process:  # forked, and ended by itself
        return
    try:
        reason = (folder / "reason").read_text(encoding="utf-8", errors="replace")
    except OSError:
        reason = ""
    shutil.rmtree(folder, ignore_errors=True)
    if reason:
        # What other packages still log while the process ends must not follow it.
        logger.error("LMCache refused to start: %s", reason)
        logging.disable()
