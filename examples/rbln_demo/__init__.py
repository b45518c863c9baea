# SPDX-License-Identifier: Apache-2.0
"""Serve a tiny model with its KV cache in LMCache: ``make demo``."""
