# SPDX-License-Identifier: Apache-2.0
"""A simulated NPU for torch-rbln and vllm-rbln, for tests on machines without one.

Importing this package changes nothing. Only :func:`activate`, :func:`environment` and
``rbln-sim exec`` put the simulated runtime where torch-rbln finds it.
"""

# First Party
from rbln_sim.activation import activate, environment

__all__ = ["activate", "environment"]
