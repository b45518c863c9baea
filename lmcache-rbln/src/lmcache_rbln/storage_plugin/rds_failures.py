# SPDX-License-Identifier: Apache-2.0
"""What becomes of a failed storage operation: ``rds_failure_policy``."""

# Standard
import threading

# Local
from .rds_device import RDSError


class Failures:
    """Remembers the first failure until it is surfaced, or ignores all.

    Args:
        policy: ``ignore`` or ``raise``.
    """

    def __init__(self, policy: str) -> None:
        self._raises = policy == "raise"
        self._first: Exception | None = None
        self._lock = threading.Lock()

    def remember(self, error: Exception | None) -> None:
        """Note a failure; the caller has logged and counted it."""
        if self._raises and error is not None:
            with self._lock:
                self._first = self._first or error

    def surface(self) -> None:
        """Raise what was remembered, once.

        Raises:
            RDSError: Under ``raise``, if there was a failure.
        """
        with self._lock:
            error, self._first = self._first, None
        if error is not None:
            raise RDSError(f"rds_failure_policy is raise: {error}") from error
