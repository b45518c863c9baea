# SPDX-License-Identifier: Apache-2.0
"""``python -m lmcache_rbln.diagnose``: what stands between this machine and a hit.

One check is one small function from facts to a :class:`~.result.Result`. The facts
come from package metadata, the environment, and two *probes*: child processes that
import what may be broken (torch, LMCache, the vendor's runtime), so that a crash or a
hang there becomes a line of the report. No NPU is opened.
"""
