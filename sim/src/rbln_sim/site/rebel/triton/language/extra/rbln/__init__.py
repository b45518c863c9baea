# SPDX-License-Identifier: Apache-2.0
"""RBLN's extensions of the kernel language."""

from . import libdevice

__all__ = ["libdevice"]
