# SPDX-License-Identifier: Apache-2.0
"""Serving engines that LMCache works in."""
