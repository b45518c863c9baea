# SPDX-License-Identifier: Apache-2.0
"""What must hold before serving; each refusal names what to change."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping
from typing import TYPE_CHECKING

# First Party
from lmcache.v1.config import LMCacheEngineConfig

if TYPE_CHECKING:
    # Third Party
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

HASH_SEED = "PYTHONHASHSEED"
#: Settings that RBLN has no use for: attribute, environment variable, what it is.
UNSUPPORTED = (
    ("use_layerwise", "LMCACHE_USE_LAYERWISE", "layer-wise transfer"),
    ("enable_blending", "LMCACHE_ENABLE_BLENDING", "blending"),
    (
        "use_gpu_connector_v3",
        "LMCACHE_USE_GPU_CONNECTOR_V3",
        "LMCache's GPU connector v3",
    ),
)


def require_hash_seed(environ: Mapping[str, str]) -> None:
    """Refuse a process whose block hashes differ from other processes'.

    Args:
        environ: The process's environment.

    Raises:
        RuntimeError: If PYTHONHASHSEED is unset, empty or ``random``.
    """
    seed = environ.get(HASH_SEED)
    if seed is None or seed.strip().lower() in ("", "random"):
        got = "it is not set" if seed is None else f"it is {seed!r}"
        raise RuntimeError(
            f"{HASH_SEED} must have a fixed value, the same in every process, or every "
            f"lookup misses; {got}. Run `export {HASH_SEED}=0` before `vllm serve`"
        )


def require_supported(
    config: LMCacheEngineConfig,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig | None,
) -> None:
    """Refuse settings and models that this connector can't serve.

    Args:
        config: LMCache's configuration.
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's plan of the KV cache, if it has one.

    Raises:
        ValueError: Naming the setting to change.
    """
    for name, variable, what in UNSUPPORTED:
        if getattr(config, name, False):
            raise ValueError(
                f"{what} is not supported on RBLN, wanted {name} off; set "
                f"{variable}=False"
            )
    if config.get_extra_config_value("save_only_first_rank", False):
        raise ValueError(
            "save_only_first_rank is not supported on RBLN, where every rank keeps "
            "its own chunks; take it out of LMCACHE_EXTRA_CONFIG"
        )
    block_size = vllm_config.cache_config.block_size
    chunk_size = config.chunk_size
    if chunk_size <= 0 or chunk_size % block_size:
        fitting = max(1, round(chunk_size / block_size)) * block_size
        raise ValueError(
            f"LMCache's chunk size is {chunk_size} tokens, wanted a multiple of vLLM's "
            f"block size {block_size}; set LMCACHE_CHUNK_SIZE={fitting}"
        )
    groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else []
    if len(groups) > 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise ValueError(
            f"hybrid models are not supported: the KV cache has {len(groups)} groups "
            f"({kinds}), wanted one of full attention; serve this model without "
            "--kv-transfer-config"
        )
    for group in groups:
        if group.kv_cache_spec.block_size != block_size:
            raise ValueError(
                f"the KV cache has blocks of {group.kv_cache_spec.block_size} tokens, "
                f"wanted vLLM's block size {block_size}; set --block-size"
            )


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
    keeps = [name for name in backends if name != "LocalCPUBackend"]
    if not keeps and not config.local_cpu and not missing:
        missing.append(
            "no storage tier is on, so nothing would ever be kept; set "
            "LMCACHE_LOCAL_CPU=True and LMCACHE_MAX_LOCAL_CPU_SIZE, or configure "
            "another tier"
        )
    cpu_bytes = int(config.max_local_cpu_size * 2**30)
    if "LocalCPUBackend" in backends and cpu_bytes < chunk_bytes:
        missing.append(
            f"the CPU tier has {cpu_bytes} bytes, wanted {chunk_bytes} for one chunk; "
            f"set LMCACHE_MAX_LOCAL_CPU_SIZE (GiB) to {chunk_bytes / 2**30:.4f} or more"
        )
    return missing
