# SPDX-License-Identifier: Apache-2.0
"""Flags of the compiler that vllm-rbln reads."""

import os

from ._unsupported import missing_attribute

RBLN_PROFILER: bool = os.environ.get("RBLN_PROFILER", "0") == "1"

__getattr__ = missing_attribute("rebel.flags")
