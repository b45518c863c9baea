# SPDX-License-Identifier: Apache-2.0
"""What the backend asks of LMCache 0.5.7 otherwise than of 0.5.6."""

# Standard
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Third Party
import torch

# First Party
from lmcache.lmcache_native import EngineKVFormat
from lmcache.v1.platform.devices.rbln.kv_groups import GroupRestore, KVGroup, KVGroups

#: LMCache 0.5.6 has no format for ``[NB, 2, NH, 1, BS, HS]``: there the caches are
#: handed over in the one without the singleton.
HAS_BLOCKS_FIRST = hasattr(EngineKVFormat, "NL_X_NB_TWO_NH_ONE_BS_HS")
BLOCKS_FIRST: EngineKVFormat = getattr(
    EngineKVFormat, "NL_X_NB_TWO_NH_ONE_BS_HS", EngineKVFormat.NL_X_NB_TWO_NH_BS_HS
)


#: LMCache 0.5.6 moves one group.
HAS_GROUPS = HAS_BLOCKS_FIRST


@dataclass
class _OneGroup:
    """The only group, of full attention."""

    layer_names: list[str]
    engine_kv_format: EngineKVFormat
    blocks_in_chunk: int
    blocks_per_window: int
    window_chunks: int = -1


def several_groups(transfers: Any) -> KVGroups | None:
    """Return the groups that a worker has registered, or None if there is only one."""
    groups = getattr(transfers, "_group_states", [])
    if not groups:
        return None
    return KVGroups(groups, transfers._chunk_tokens, transfers._null_block_id)


def groups_of(
    transfers: Any, kv_caches: Mapping[str, Any], blocks_in_chunk: int
) -> KVGroups:
    """Return the groups that a worker has registered.

    Args:
        transfers: The worker's context.
        kv_caches: KV tensor by layer name.
        blocks_in_chunk: Blocks of a chunk, if there is one group.
    """
    kv_format = transfers._engine_kv_format
    one = _OneGroup(list(kv_caches), kv_format, blocks_in_chunk, blocks_in_chunk)
    return several_groups(transfers) or KVGroups([one])


def window_of(group: KVGroup) -> dict[str, Any]:
    """Return how many blocks of a chunk are stored, as a scatter is told."""
    return {"blocks_per_window": group.blocks_per_window} if HAS_GROUPS else {}


def prepare_retrieve(
    context: Any, key: Any, instance_id: int, parts: Sequence[GroupRestore]
) -> list[list[torch.Tensor]] | None:
    """Ask the server for stored chunks.

    Args:
        context: LMCache's context of the transport.
        key: What is stored.
        instance_id: The worker's number.
        parts: What is wanted of each group.

    Returns:
        The chunks of each group, or None if the server lacks any.
    """
    found: list[tuple[Sequence[int], list[torch.Tensor]]] | None
    wanted = [part.chunks for part in parts]
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
        slots = context.prepare_retrieve_grouped(key, instance_id)
        found = None if slots is None else _by_group(slots, len(wanted))
    if found is None or [list(at) for at, _ in found] != [list(at) for at in wanted]:
        return None
    return [chunks for _, chunks in found]


def _by_group(
    slots: tuple[list[torch.Tensor], list[int], list[int]], count: int
) -> list[tuple[Sequence[int], list[torch.Tensor]]]:
    """Sort slots, each with its group and its chunk, by group."""
    found: list[tuple[list[int], list[torch.Tensor]]] = [([], []) for _ in range(count)]
    for slot, group, chunk in zip(*slots, strict=True):
        found[group][0].append(chunk)
        found[group][1].append(slot)
    return list(found)
