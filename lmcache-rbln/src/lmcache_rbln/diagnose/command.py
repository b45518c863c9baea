# SPDX-License-Identifier: Apache-2.0
"""Run a program to its end, however it ends, and never wait for it longer."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
import os
import signal
import subprocess
import tempfile

_KILL_WAIT_S = 5.0
_MOST_OUTPUT = 1 << 21


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    Attributes:
        output: Its standard output.
        errors: Its standard error.
        code: Its exit code; None if it had none.
        problem: Why it had none, or empty.
    """

    output: str = ""
    errors: str = ""
    code: int | None = None
    problem: str = ""


def run_command(
    command: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    text: str = "",
) -> Ended:
    """Run a program and kill it, with all that it started, when its time is over.

    Args:
        command: Program and arguments.
        timeout_s: Its time.
        environment: Its whole environment; this process's by default.
        text: Its standard input.
    """
    # Files, not pipes: a process that outlives the program would keep a pipe open.
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        given.write(text.encode())
        given.seek(0)
        try:
            child = subprocess.Popen(
                list(command),
                env=None if environment is None else dict(environment),
                stdin=given,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            return Ended(problem=f"can't start {command[0]}: {error.strerror}")
        code, problem = _wait(child, timeout_s)
        texts = []
        for file in (output, errors):
            file.seek(0)
            start = file.read(_MOST_OUTPUT)
            # Without the middle, where there is too much.
            rest = file.seek(0, os.SEEK_END) - _MOST_OUTPUT
            file.seek(max(len(start), rest))
            texts.append((start + file.read()).decode("utf-8", "replace"))
    return Ended(texts[0], texts[1], code, problem)


def _wait(child: subprocess.Popen[bytes], timeout_s: float) -> tuple[int | None, str]:
    try:
        code = child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        # A process that hangs inside a driver doesn't die; it is left behind.
        with suppress(subprocess.TimeoutExpired):
            child.wait(_KILL_WAIT_S)
        return None, f"no answer in {timeout_s:g} s"
    if code < 0:
        return None, f"it was ended by signal {-code} ({signal.Signals(-code).name})"
    return code, ""
