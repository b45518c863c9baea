# SPDX-License-Identifier: Apache-2.0
"""Large host buffers (``torch.rbln.huge_host_empty``)."""

import mmap

from ._unsupported import missing_attribute

__all__ = ["HugeHostBuffer"]


class HugeHostBuffer(mmap.mmap):
    """Zero-filled, page-aligned host memory that supports the buffer protocol.

    The memory lives until the last view of it is gone.

    Args:
        nbytes: Size in bytes, at least 1.
    """

    def __new__(cls, nbytes: int) -> "HugeHostBuffer":
        return super().__new__(cls, -1, nbytes)


__getattr__ = missing_attribute("rebel.host_memory")
