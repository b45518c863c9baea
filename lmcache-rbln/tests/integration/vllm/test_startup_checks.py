# SPDX-License-Identifier: Apache-2.0
"""Refusals before serving."""

# Standard
from types import SimpleNamespace
from typing import Any

# Third Party
from vllm.v1 import kv_cache_interface
from vllm_rbln.v1 import kv_cache
import pytest
import torch

# First Party
from lmcache.v1.config import LMCacheEngineConfig
from lmcache_rbln.integration.vllm import startup_checks


def config(**settings: Any) -> LMCacheEngineConfig:
    return LMCacheEngineConfig.from_defaults(**({"chunk_size": 256} | settings))


def vllm_config(block_size: int = 128) -> Any:
    return SimpleNamespace(cache_config=SimpleNamespace(block_size=block_size))


def groups(*block_sizes: int) -> Any:
    return of_specs(*(spec("FullAttentionSpec", size) for size in block_sizes))


def of_specs(*specs: Any) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    )


def spec(name: str, block_size: int = 128, **more: Any) -> Any:
    """One of vLLM's or vLLM-RBLN's specs of a KV cache."""
    module = kv_cache if name.startswith("RBLN") else kv_cache_interface
    sizes = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    return getattr(module, name)(block_size=block_size, **sizes, **more)


def test_what_is_supported() -> None:
    startup_checks.require_supported(vllm_config(), groups(128))
    startup_checks.require_supported(vllm_config(256), None)


def test_hybrid_models_are_refused() -> None:
    with pytest.raises(ValueError, match="hybrid models are not supported.* 2 groups"):
        startup_checks.require_supported(vllm_config(), groups(128, 128))


@pytest.mark.parametrize("name", ["SlidingWindowSpec", "RBLNSlidingWindowSpec"])
def test_a_model_of_sliding_windows_alone_is_refused(name: str) -> None:
    windows = spec(name, sliding_window=64)
    with pytest.raises(ValueError, match=f"is of {name}, wanted full attention"):
        startup_checks.require_supported(vllm_config(), of_specs(windows))


def test_layers_that_share_a_group_are_looked_at_one_by_one() -> None:
    layers = {
        "layer.0": spec("FullAttentionSpec"),
        "layer.1": spec("SlidingWindowSpec", sliding_window=64),
    }
    uniform = kv_cache_interface.UniformTypeKVCacheSpecs(
        block_size=128, kv_cache_specs=layers
    )
    with pytest.raises(ValueError, match="is of SlidingWindowSpec, wanted full"):
        startup_checks.require_supported(vllm_config(), of_specs(uniform))


def test_mla_is_supported() -> None:
    mla = spec("MLAAttentionSpec")
    startup_checks.require_supported(vllm_config(), of_specs(mla))


def test_a_kernel_block_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 16 tokens, wanted .* 128"):
        startup_checks.require_supported(vllm_config(), groups(16))
    # The tensors may have smaller blocks than vLLM plans with.
    startup_checks.require_block_size(128, 128)
    with pytest.raises(ValueError, match="blocks of 64 tokens.*--block-size 64"):
        startup_checks.require_block_size(64, 128)


def test_another_device() -> None:
    startup_checks.require_rbln("rbln")
    with pytest.raises(RuntimeError, match="LMCACHE_DEVICE_BACKEND=rbln"):
        startup_checks.require_rbln("cpu")


@pytest.mark.parametrize(
    ("settings", "backends", "message"),
    [
        ({"storage_plugins": ["P"]}, ["LocalCPUBackend"], "storage backend P"),
        ({"remote_storage_plugins": ["r"]}, [], "storage backend RemoteBackend-r"),
        (
            {"max_local_cpu_size": 2**-20},
            ["LocalCPUBackend"],
            "has 1024 bytes, wanted 4096 for one chunk",
        ),
    ],
)
def test_tiers_that_are_missing(
    settings: dict[str, Any], backends: list[str], message: str
) -> None:
    (missing,) = startup_checks.missing_tiers(
        config(**settings), dict.fromkeys(backends), 4096
    )
    assert message in missing


def test_a_remote_tier_without_a_connection() -> None:
    backends = {"RemoteBackend": SimpleNamespace(connection=None)}
    (missing,) = startup_checks.missing_tiers(config(), backends, 4096)
    assert missing == "RemoteBackend has no connection"
    backends = {"RemoteBackend": SimpleNamespace(connection=object())}
    assert not startup_checks.missing_tiers(config(), backends, 4096)


@pytest.mark.parametrize(
    ("formatted", "wanted"),
    [
        ("", "LMCache is not healthy"),
        ("KeyError: 'LocalCPUBackend'\n", "KeyError: 'LocalCPUBackend'"),
        (
            'Traceback (most recent call last):\n  File "a.py", line 1, in f\n'
            "    g()\n    ^^^\nValueError: one\nand two\n",
            "ValueError: one and two",
        ),
    ],
)
def test_a_traceback_in_one_line(formatted: str, wanted: str) -> None:
    assert startup_checks.exception_of(formatted) == wanted


@pytest.mark.parametrize(
    ("settings", "backends"),
    [
        ({}, ["LocalCPUBackend"]),
        ({"local_cpu": False, "storage_plugins": ["P"]}, ["P"]),
        ({"local_cpu": False, "local_disk": "d"}, ["LocalCPUBackend", "LocalDisk"]),
    ],
)
def test_tiers_that_are_there(settings: dict[str, Any], backends: list[str]) -> None:
    there = dict.fromkeys(backends)
    assert not startup_checks.missing_tiers(config(**settings), there, 4096)
