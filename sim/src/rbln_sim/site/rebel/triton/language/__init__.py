# SPDX-License-Identifier: Apache-2.0
"""``rebel.triton.language``: annotations only; kernel bodies never run."""

from ..._unsupported import missing_attribute

__all__ = ["constexpr"]


class constexpr:
    """Annotation of a kernel parameter that is known when the kernel is built."""


__getattr__ = missing_attribute("rebel.triton.language")
