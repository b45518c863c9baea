# SPDX-License-Identifier: Apache-2.0
"""Serve a tiny model with its KV cache in LMCache: ``make demo``.

``processes`` runs one server as a process group, ``servers`` knows the commands
of ``lmcache server`` and ``vllm serve``, ``client`` speaks HTTP to both,
``runtime`` picks the NPU or the simulator, ``report`` judges and prints.
The end-to-end tests use the same modules.
"""
