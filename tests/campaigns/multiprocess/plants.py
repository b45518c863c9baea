# SPDX-License-Identifier: Apache-2.0
"""Faults of ours that the campaign must find; each is planted in its workers."""

# Standard
from collections.abc import Callable
from typing import Any

# First Party
from lmcache.integration.vllm import vllm_multi_process_adapter as adapters
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transfer_context.shm import (
    ABORT_STORE,
    EngineDrivenContextShm,
)
from lmcache.v1.platform.devices.rbln import staging, transfer_context, transfers
from lmcache.v1.platform.devices.rbln.kv_groups import KVGroups

Context = transfer_context.RblnTransferContext
PLANTS: dict[str, Callable[[], None]] = {}


def _plant(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replace a method by a faulty one, which is given the right one first."""

    def as_fault(faulty: Callable[..., Any]) -> None:
        def plant() -> None:
            right = getattr(owner, name)
            setattr(owner, name, lambda *args, **more: faulty(right, *args, **more))

        PLANTS[faulty.__name__.strip("_").replace("_", "-")] = plant

    return as_fault


@_plant(transfers.Restore, "begin")
def load_reported_before_it_is_written(right: Any, restore: Any) -> None:
    right(restore)
    MessagingFuture.set_result(restore, True)


@_plant(transfer_context, "prepare_retrieve")
def chunks_given_back_before_they_are_read(
    right: Any, context: Any, key: Any, instance_id: int, parts: Any
) -> Any:
    found = right(context, key, instance_id, parts)
    context.req_client._client.commit_retrieve(key.key, instance_id)
    return found


@_plant(transfers.Server, "commit_retrieve")
def chunks_not_given_back(right: Any, server: Any, restore: Any, number: int) -> Any:
    if hash(restore.key.request_id) % 8:
        return right(server, restore, number)
    answer: MessagingFuture[bool] = MessagingFuture()
    answer.set_result(True)
    return answer


@_plant(transfers.Store, "commit")
def abort_not_sent(right: Any, store: Any, client: Any, number: int, data: Any) -> Any:
    return None if data == ABORT_STORE else right(store, client, number, data)


@_plant(KVGroups, "to_restore")
def two_blocks_swapped(right: Any, groups: Any, ids: Any, skip: int) -> Any:
    parts = right(groups, ids, skip)
    for part in parts:
        if len(part.block_ids) > 40:
            part.block_ids[7:9] = part.block_ids[8], part.block_ids[7]
    return parts


@_plant(KVGroups, "to_restore")
def skipped_tokens_written(right: Any, groups: Any, ids: Any, _skip: int) -> Any:
    return right(groups, ids, 0)


@_plant(staging.StagingArena, "acquire")
def staging_returned_too_early(right: Any, arena: Any, lease: Any) -> None:
    right(arena, lease)
    lease.ended = True


@_plant(Context, "_alloc_pinned_staging")
def chunks_that_are_sent_shared(right: Any, context: Any, *what: Any) -> Any:
    chunks = right(context, *what)
    context._release_staging(chunks)
    return chunks


@_plant(adapters.LMCacheMPWorkerAdapter, "_create_key")
def tenant_dropped(right: Any, adapter: Any, *args: Any, **more: Any) -> Any:
    return right(adapter, *args, **(more | {"cache_salt": ""}))


@_plant(transfer_context._Event, "wait")
def forward_not_waited_for(_right: Any, _event: Any, _stream: Any = None) -> None:
    pass


@_plant(Context, "flush_inflight_stores")
def stores_not_flushed(_right: Any, _context: Any) -> None:
    pass


@_plant(transfers.Restore, "set_result")
def failed_load_reported_as_loaded(right: Any, restore: Any, _result: bool) -> None:
    right(restore, True)


@_plant(transfers.Transfer, "abandon")
def load_given_up_while_it_is_written(right: Any, transfer: Any) -> bool:
    right(transfer)
    if not transfer.query():
        MessagingFuture.set_result(transfer, False)
    return True


@_plant(EngineDrivenContextShm, "close")
def shared_memory_not_closed(_right: Any, _context: Any) -> None:
    pass


@_plant(transfer_context, "scatter_cpu_to_paged_kv")
def last_layer_not_written(right: Any, caches: Any, *args: Any, **more: Any) -> Any:
    # All layers are told to the native engine by their chunk: the first one twice.
    first = next(iter(caches))
    return right(dict.fromkeys(caches, caches[first]), *args, **more)
