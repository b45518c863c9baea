# SPDX-License-Identifier: Apache-2.0
"""What LMCache's server does with the slots of a worker that says nothing for long."""

# Standard
from types import SimpleNamespace
from typing import Any
from unittest import mock

# First Party
from lmcache.v1.multiprocess.modules.engine_driven_transfer import (
    EngineDrivenTransferModule,
)


def test_it_may_go_on_to_fill_them() -> None:
    module: Any = EngineDrivenTransferModule(mock.MagicMock())
    registered = SimpleNamespace(
        last_seen=0.0, has_liveness_signal=True, model_name="model", world_size=1
    )
    module._engine_driven_contexts[7] = registered
    module._strategies[7] = mock.MagicMock()
    module._pending_shm_writes[7, "a request", "key"] = ["filled"]
    module._pending_shm_reads[7, "a request", "key"] = ["read"]
    storage = module.context.storage_manager
    assert module.reap_stale_instances(1.0, 1.0) == [7]
    storage.finish_read_prefetched.assert_called_once_with(["read"])
    storage.discard_write.assert_not_called()
    storage.finish_write.assert_not_called()
    # It is back, and ends.
    module._engine_driven_contexts[7] = registered
    module.unregister_kv_cache(7)
    storage.discard_write.assert_called_once_with(["filled"])
