# SPDX-License-Identifier: Apache-2.0
"""Every setting that matters to LMCache in process on RBLN, and what it may be.

The engine (:func:`require`) and ``python -m lmcache_rbln.diagnose`` (:func:`examine`)
ask the same table and the same rules, so that what one refuses the other reports.
LMCache itself is asked for the names and types of its settings.
"""

# Local
from .check import examine, require, require_parsed
from .own import RECOMPUTE, Settings
from .rules import fitting_chunk_size

__all__ = [
    "RECOMPUTE",
    "Settings",
    "examine",
    "fitting_chunk_size",
    "require",
    "require_parsed",
]
