# SPDX-License-Identifier: Apache-2.0
"""What the backend asks of LMCache 0.5.7 otherwise than of 0.5.6."""

# Standard
from collections.abc import Sequence
from typing import Any

# Third Party
import torch

# First Party
from lmcache.lmcache_native import EngineKVFormat
from lmcache.v1.platform.devices.rbln.kv_groups import KVGroup

#: LMCache 0.5.6 has no format for ``[NB, 2, NH, 1, BS, HS]``: there the caches are
#: handed over in the one without the singleton.
HAS_BLOCKS_FIRST = hasattr(EngineKVFormat, "NL_X_NB_TWO_NH_ONE_BS_HS")
BLOCKS_FIRST: EngineKVFormat = getattr(
    EngineKVFormat, "NL_X_NB_TWO_NH_ONE_BS_HS", EngineKVFormat.NL_X_NB_TWO_NH_BS_HS
)


#: LMCache 0.5.6 moves one group.
HAS_GROUPS = HAS_BLOCKS_FIRST


def groups_of(transfers: Any) -> list[KVGroup]:
    """Return the groups that a worker has registered; none if there is only one."""
    return getattr(transfers, "_group_states", [])


def prepare_retrieve(
    context: Any, key: Any, instance_id: int, wanted: Sequence[range]
) -> list[list[torch.Tensor]] | None:
    """Ask the server for stored chunks.

    Args:
        context: LMCache's context of the transport.
        key: What is stored.
        instance_id: The worker's number.
        wanted: The chunks of each group.

    Returns:
        The chunks of each group, or None if the server lacks any.
    """
    found: list[tuple[Sequence[int], list[torch.Tensor]]] | None
    layouts = getattr(context.metadata, "group_layouts", None)
    if layouts is None:
        counted = (len(wanted[0]),) if HAS_GROUPS else ()
        chunks = context.prepare_retrieve(key, instance_id, *counted)
        found = None if chunks is None else [(range(len(chunks)), chunks)]
    elif hasattr(context, "prepare_retrieve_multigroup"):
        expected = [
            (layout.shapes[0], layout.dtypes[0], chunks.stop)
            for layout, chunks in zip(layouts, wanted, strict=True)
        ]
        found = context.prepare_retrieve_multigroup(key, instance_id, expected)
    else:
        found = _by_group(context.prepare_retrieve_grouped(key, instance_id), wanted)
    if found is None or [list(at) for at, _ in found] != [list(at) for at in wanted]:
        return None
    return [chunks for _, chunks in found]


def _by_group(
    slots: tuple[list[torch.Tensor], list[int], list[int]] | None,
    wanted: Sequence[range],
) -> list[tuple[Sequence[int], list[torch.Tensor]]] | None:
    """Sort slots, each with its group and chunk, by group."""
    if slots is None:
        return None
    tensors, groups, chunks = slots
    return [
        (
            [chunk for chunk, of in zip(chunks, groups, strict=True) if of == group],
            [tensor for tensor, of in zip(tensors, groups, strict=True) if of == group],
        )
        for group in range(len(wanted))
    ]
