# SPDX-License-Identifier: Apache-2.0
"""The vLLM extension of LMCache for Rebellions RBLN NPUs."""

__version__ = "0.12.0"
