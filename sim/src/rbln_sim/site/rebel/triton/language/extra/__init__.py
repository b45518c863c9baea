# SPDX-License-Identifier: Apache-2.0
"""Vendor extensions of the kernel language."""
