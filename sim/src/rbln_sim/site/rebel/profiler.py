# SPDX-License-Identifier: Apache-2.0
"""Start and end of a profiled section; the simulator has no device profile."""

from ._unsupported import missing_attribute


def start() -> None:
    """Begin a section. Nothing is recorded: there is no device to profile."""


def done() -> None:
    """End the section begun by :func:`start`."""


__getattr__ = missing_attribute("rebel.profiler")
