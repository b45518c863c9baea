# SPDX-License-Identifier: Apache-2.0
"""Lets a storage plugin allocate LMCache's memory objects where there is no CPU tier.

LMCache 0.5.6 looks for ``LocalCPUBackend`` alone and ends with a ``KeyError`` when
``LMCACHE_MAX_LOCAL_CPU_SIZE`` is 0, as the documentation of direct storage sets it.
"""

# Standard
from collections.abc import Callable
import functools

# First Party
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.storage_backend.abstract_backend import AllocatorBackendInterface
from lmcache.v1.storage_backend.storage_manager import StorageManager

_Choose = Callable[[StorageManager, LMCacheEngineConfig], AllocatorBackendInterface]
_MARK = "_lmcache_rbln_choice"


def install() -> None:
    """Make :class:`StorageManager` take a plugin's allocator where it has no other.

    Where LMCache finds one itself, nothing changes. A second call does nothing.
    """
    original: _Choose = StorageManager._get_allocator_backend
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def choose(
        manager: StorageManager, config: LMCacheEngineConfig
    ) -> AllocatorBackendInterface:
        try:
            return original(manager, config)
        except KeyError:
            for backend in manager.storage_backends.values():
                if isinstance(backend, AllocatorBackendInterface):
                    return backend
            raise RuntimeError(
                "LMCache has no memory for KV chunks: the CPU tier is off "
                "(LMCACHE_MAX_LOCAL_CPU_SIZE=0) and no storage plugin was created; "
                "see 'Failed to create backend' above"
            ) from None

    setattr(choose, _MARK, True)
    StorageManager._get_allocator_backend = choose  # type: ignore
