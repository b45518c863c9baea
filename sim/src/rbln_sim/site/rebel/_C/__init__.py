# SPDX-License-Identifier: Apache-2.0
"""The native part of `rebel`: only what direct storage needs of it is simulated."""

from .._unsupported import missing_attribute
from . import vmem

__all__ = ["vmem"]

__getattr__ = missing_attribute("rebel._C")
