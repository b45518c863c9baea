# SPDX-License-Identifier: Apache-2.0
"""Custom operators of the simulated device; importing registers them."""

from . import torch_custom_ops

__all__ = ["torch_custom_ops"]
