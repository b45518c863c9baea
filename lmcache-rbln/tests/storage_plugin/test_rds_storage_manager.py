# SPDX-License-Identifier: Apache-2.0
"""LMCache with a storage plugin as its only memory for KV chunks."""

# Third Party
from rds_support import (
    Engine,
    Storage,
    config_of,
    key_of,
    metadata_of,
)
import pytest

# First Party
from lmcache.v1.storage_backend.storage_manager import StorageManager
from lmcache_rbln._lmcache import in_process
from lmcache_rbln.storage_plugin.rds_backend import RDSBackend

pytestmark = pytest.mark.npu


events = in_process("v1.event_manager").EventManager
PLUGIN = {
    "storage_plugin.RDSBackend.module_path": "lmcache_rbln.storage_plugin.rds_backend",
    "storage_plugin.RDSBackend.class_name": "RDSBackend",
}


def test_lmcache_works_without_a_cpu_tier(storage: Storage) -> None:
    """What ends with a KeyError in LMCache alone: the documented settings."""
    config = config_of(PLUGIN, storage_plugins=["RDSBackend"])
    manager = StorageManager(config, metadata_of(), events())
    try:
        assert list(manager.storage_backends) == ["RDSBackend"]
        backend = manager.allocator_backend
        assert isinstance(backend, RDSBackend)
        one = Engine(backend)
        objs = [one.chunk(number) for number in (0, 1)]
        keys = [key_of(0), key_of(1)]
        manager.batched_put(keys, list(objs))
        one.wait_for_writes()
        assert [obj.get_ref_count() for obj in objs] == [0, 0]
        one.assert_idle()
        assert manager.batched_contains([*keys, key_of(2)], pin=True) == (
            2,
            {"RDSBackend": keys},
        )
        back = manager.batched_get(keys, location="RDSBackend")
        for obj in back:
            assert obj is not None
            obj.ref_count_down()
        manager.batched_unpin(keys, ["RDSBackend"])
        assert manager.memcheck()
        assert manager.clear() == 256
    finally:
        manager.close()
    assert not manager.thread.is_alive()


def test_a_plugin_that_fails_is_named(storage: Storage) -> None:
    config = config_of(PLUGIN | {"rds_bufer_size": 1}, storage_plugins=["RDSBackend"])
    with pytest.raises(RuntimeError, match="no storage plugin was created"):
        StorageManager(config, metadata_of(), events())
