# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of KV transfer; see README.md."""
