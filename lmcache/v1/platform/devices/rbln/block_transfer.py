# SPDX-License-Identifier: Apache-2.0
"""What a transfer fails with whose copies are not known to have ended."""


class StillInFlightError(RuntimeError):
    """A transfer failed, and its copies may use its memory still: don't reuse that."""
