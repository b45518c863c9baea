# SPDX-License-Identifier: Apache-2.0
"""How this release of LMCache calls vLLM-RBLN's blocks-first KV caches."""

# First Party
from lmcache.lmcache_native import EngineKVFormat

#: LMCache 0.5.6 has no format for ``[NB, 2, NH, 1, BS, HS]``: there the caches are
#: handed over in the one without the singleton.
HAS_BLOCKS_FIRST = hasattr(EngineKVFormat, "NL_X_NB_TWO_NH_ONE_BS_HS")
BLOCKS_FIRST: EngineKVFormat = getattr(
    EngineKVFormat, "NL_X_NB_TWO_NH_ONE_BS_HS", EngineKVFormat.NL_X_NB_TWO_NH_BS_HS
)
