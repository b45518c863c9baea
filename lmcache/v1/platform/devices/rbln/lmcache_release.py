# SPDX-License-Identifier: Apache-2.0
"""What the backend asks of LMCache 0.5.7 otherwise than of 0.5.6."""

# Standard
from typing import Any

# Third Party
import torch

# First Party
from lmcache.lmcache_native import EngineKVFormat

#: LMCache 0.5.6 has no format for ``[NB, 2, NH, 1, BS, HS]``: there the caches are
#: handed over in the one without the singleton.
HAS_BLOCKS_FIRST = hasattr(EngineKVFormat, "NL_X_NB_TWO_NH_ONE_BS_HS")
BLOCKS_FIRST: EngineKVFormat = getattr(
    EngineKVFormat, "NL_X_NB_TWO_NH_ONE_BS_HS", EngineKVFormat.NL_X_NB_TWO_NH_BS_HS
)


def prepare_retrieve(
    context: Any, key: Any, instance_id: int, chunks: int
) -> list[torch.Tensor] | None:
    """Ask the server for stored chunks; 0.5.7 wants to be told how many."""
    counted = (chunks,) if HAS_BLOCKS_FIRST else ()
    return context.prepare_retrieve(key, instance_id, *counted)
