# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.rbln_custom_ops`` and ``torch.ops.rbln``."""

from . import attn, sampling

__all__ = ["attn", "sampling"]
