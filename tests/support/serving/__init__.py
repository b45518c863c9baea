# SPDX-License-Identifier: Apache-2.0
"""Both servers on a real or simulated NPU, for tests, benchmarks and the demo.

``processes`` runs one server as a process group, ``servers`` knows the commands
of ``lmcache server`` and ``vllm serve``, ``client`` speaks HTTP to both,
``runtime`` picks the NPU or the simulator, ``tiny_models`` makes models.
"""
