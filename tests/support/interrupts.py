# SPDX-License-Identifier: Apache-2.0
"""An interrupt at any line, as Ctrl-C in a program of the user's makes one."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable
from types import FrameType
import linecache
import sys
import threading


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th line of some files that runs.

    Args:
        line: Which one.
        files: Ends of the files' paths.
        quiet: Lines of a "finally" that only assign, and so take no signal.
    """

    def __init__(self, line: int, *files: str, quiet: tuple[str, ...] = ()) -> None:
        self._left = line
        self._files = files
        self._quiet = quiet

    def __call__(self, frame: FrameType, event: str, _: object) -> InterruptAt | None:
        caller = frame.f_back
        if (
            frame.f_code.co_name == "__enter__"
            and frame.f_code.co_filename == threading.__file__
            and caller
            and caller.f_code.co_filename.endswith(self._files)
        ):
            # Of a lock in Python: behind its last line it is held.
            self._count(event == "return")
            return self
        if not frame.f_code.co_filename.endswith(self._files):
            return None
        # Before it releases a lock CPython traces the line, but takes no signal.
        code = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        quiet = "lock:" in code or code.strip() in self._quiet
        self._count(event == "line" and not quiet)
        return self

    def _count(self, here: bool) -> None:
        self._left -= here
        if here and self._left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt

    def strikes(self, work: Callable[[], None]) -> bool:
        """Run ``work``; return whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False
