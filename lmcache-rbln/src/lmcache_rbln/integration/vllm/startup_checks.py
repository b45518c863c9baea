# SPDX-License-Identifier: Apache-2.0
"""What must hold before serving; each refusal names what to change."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

# First Party
from lmcache.v1.config import LMCacheEngineConfig

if TYPE_CHECKING:
    # Third Party
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def require_supported(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None
) -> None:
    """Refuse models that this connector can't serve.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's plan of the KV cache, if it has one.

    Raises:
        ValueError: Naming the setting to change.
    """
    block_size = vllm_config.cache_config.block_size
    groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else []
    if len(groups) > 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise ValueError(
            f"hybrid models are not supported: the KV cache has {len(groups)} groups "
            f"({kinds}), wanted one of full attention; serve this model without "
            "--kv-transfer-config"
        )
    for group in groups:
        for spec in _layer_specs(group.kv_cache_spec):
            if not _is_full_attention(spec):
                raise ValueError(
                    f"the KV cache is of {type(spec).__name__}, wanted full attention "
                    "(FullAttentionSpec, MLAAttentionSpec); serve this model without "
                    "--kv-transfer-config"
                )
        require_block_size(group.kv_cache_spec.block_size, block_size)


def require_block_size(got: int, wanted: int) -> None:
    """Refuse a KV cache whose blocks are not the scheduler's.

    Args:
        got: Tokens per block of the KV cache.
        wanted: vLLM's block size.

    Raises:
        ValueError: If they differ.
    """
    if got != wanted:
        raise ValueError(
            f"the KV cache has blocks of {got} tokens, wanted vLLM's block size "
            f"{wanted}; start vLLM with --block-size {got}, or without "
            "--kv-transfer-config"
        )


def _layer_specs(spec: Any) -> list[Any]:
    """Return what ``UniformTypeKVCacheSpecs`` holds, or the spec itself."""
    return list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]


def _is_full_attention(spec: Any) -> bool:
    """Return whether all blocks of a request are kept (sliding windows: not)."""
    return any(kind.__name__ == "FullAttentionSpec" for kind in type(spec).__mro__)


def require_rbln(device_type: str) -> None:
    """Refuse a worker in which LMCache runs on another device.

    Args:
        device_type: The device that LMCache chose.

    Raises:
        RuntimeError: If that is not RBLN.
    """
    if device_type != "rbln":
        raise RuntimeError(
            f"LMCache runs on {device_type!r} in this worker, wanted 'rbln'; set "
            "LMCACHE_DEVICE_BACKEND=rbln to learn why"
        )


def exception_of(formatted: str) -> str:
    """Return the exception of a formatted traceback, in one line.

    Args:
        formatted: As ``traceback.format_exception`` makes it; may be empty.

    Returns:
        What stands behind the last frame.
    """
    lines = formatted.rstrip().splitlines()
    frames = [place for place, line in enumerate(lines) if line.startswith("  ")]
    last = lines[frames[-1] + 1 :] if frames else lines
    return " ".join(" ".join(last).split()) or "LMCache is not healthy"


def missing_tiers(
    config: LMCacheEngineConfig, backends: Mapping[str, object], chunk_bytes: int
) -> list[str]:
    """Return the storage tiers that the settings name and LMCache can't use.

    Args:
        config: LMCache's configuration.
        backends: Its storage backends by name.
        chunk_bytes: Size of a whole chunk.

    Returns:
        One sentence for each, empty if all is well.
    """
    plugins = list(config.storage_plugins or [])
    remote = [f"RemoteBackend-{name}" for name in config.remote_storage_plugins or []]
    missing = [
        f"storage backend {name} is configured but could not be created"
        for name in [*plugins, *remote]
        if name not in backends
    ]
    missing += [
        f"{name} has no connection"
        for name, backend in backends.items()
        if name.startswith("RemoteBackend")
        and getattr(backend, "connection", backend) is None
    ]
    cpu_bytes = int(config.max_local_cpu_size * 2**30)
    if "LocalCPUBackend" in backends and cpu_bytes < chunk_bytes:
        missing.append(
            f"the CPU tier has {cpu_bytes} bytes, wanted {chunk_bytes} for one chunk; "
            f"set LMCACHE_MAX_LOCAL_CPU_SIZE (GiB) to {chunk_bytes / 2**30:.4f} or more"
        )
    return missing
