# SPDX-License-Identifier: Apache-2.0
"""Which NPU model the simulator pretends to be."""

import os

from ._unsupported import missing_attribute

__all__ = ["get_npu_name"]

# A four-chiplet model: vllm-rbln refuses RBLN-CA* where models are vLLM's.
_NPU_NAME = "RBLN-CR03"


def get_npu_name(device_id: int = 0) -> str:
    """Name of an NPU, without opening it.

    Args:
        device_id: Index of the NPU; all simulated NPUs are of one model.

    Returns:
        ``RBLN_FORCE_NPU_NAME`` if that is set, else the simulated model's name.
    """
    return os.environ.get("RBLN_FORCE_NPU_NAME") or _NPU_NAME


__getattr__ = missing_attribute("rebel.device_info")
