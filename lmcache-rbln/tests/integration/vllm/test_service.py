# SPDX-License-Identifier: Apache-2.0
"""A transfer that fails is a miss, and nothing leaks."""

# Standard
from types import SimpleNamespace
from typing import Any
import logging

# Third Party
import pytest
import torch

# First Party
from lmcache_rbln.integration.vllm import service
from lmcache_rbln.paged_kv import TransferFailedError

pytestmark = pytest.mark.npu


class Obj:
    """A memory object's references and pins."""

    def __init__(self) -> None:
        self.references = 1
        self.is_pinned = True

    def ref_count_down(self) -> None:
        self.references -= 1

    def unpin(self) -> None:
        self.is_pinned = False


def engine_with(result: Any, async_loading: bool = False) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    engine: Any = SimpleNamespace(
        store=call, retrieve=call, async_loading=async_loading
    )
    service._miss_instead_of_raise(engine)
    return engine


@pytest.mark.parametrize("async_loading", [False, True])
def test_a_failed_load_is_a_miss(async_loading: bool) -> None:
    objects: list[Any] = [Obj(), Obj()]
    error = TransferFailedError("device lost", objects)
    engine = engine_with(error, async_loading)
    mask = engine.retrieve([1, 2, 3], None, req_id="r")
    assert mask.tolist() == [False] * 3
    assert [obj.references for obj in objects] == [0, 0]
    # A blocking load leaves the pins to the lookup that took them.
    assert [obj.is_pinned for obj in objects] == [not async_loading] * 2


def test_a_failed_store_keeps_nothing() -> None:
    objects: list[Any] = [Obj()]
    engine_with(TransferFailedError("device lost", objects)).store([1], req_id="r")
    assert objects[0].references == 0
    assert objects[0].is_pinned


def test_what_succeeds_is_passed_on() -> None:
    mask = torch.ones(3, dtype=torch.bool)
    assert engine_with(mask).retrieve([1, 2, 3], None) is mask


def test_other_errors_are_passed_on() -> None:
    engine = engine_with(KeyError("bug"))
    with pytest.raises(KeyError, match="bug"):
        engine.retrieve([1], None)
    with pytest.raises(KeyError, match="bug"):
        engine.store([1])


def test_why_a_backend_could_not_be_made_is_collected() -> None:
    backends = logging.getLogger("lmcache.v1.storage_backend")
    remote = logging.getLogger("lmcache.v1.storage_backend.remote_backend")
    handlers = [list(backends.handlers), list(remote.handlers)]
    with service.logged_failures() as failures:
        backends.error("Failed to create backend %s: %s", "P", "no such module")
        backends.warning("The 'memory_allocator' argument is deprecated")
        remote.warning("Failed to initialize/re-establish remote connection: why")
    backends.error("Failed to create backend Q: later")
    assert failures == [
        "Failed to create backend P: no such module",
        "Failed to initialize/re-establish remote connection: why",
    ]
    assert [backends.handlers, remote.handlers] == handlers


@pytest.mark.parametrize("enabled", [False, True])
def test_sockets_of_a_server_that_is_off_are_not_ours(enabled: bool) -> None:
    """Their names begin as a user says, and may be another engine's."""
    config: Any = SimpleNamespace(
        internal_api_server_enabled=enabled,
        internal_api_server_socket_path_prefix="/tmp/api",
        internal_api_server_port_start=6999,
    )
    vllm: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id="e", kv_connector_extra_config={}),
        parallel_config=SimpleNamespace(rank=0),
    )
    paths = service.socket_paths(config, vllm)
    assert [path for path in paths if path.startswith("/tmp/api")] == (
        ["/tmp/api_6999", "/tmp/api_7000"] if enabled else []
    )
