# SPDX-License-Identifier: Apache-2.0
"""Our classes against the installed base classes: names, arguments, abstractness."""

# Standard
from typing import Any
from pathlib import Path
import inspect
import re

# Third Party
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request
from vllm_rbln.distributed.kv_transfer.kv_connector.v1 import rbln_lmcache_connector
from vllm_rbln.distributed.kv_transfer.kv_connector.v1.utils import (
    SupportsKVCacheRegistrationFinalize,
)

# First Party
from lmcache_rbln._lmcache import (
    GPUConnectorInterface,
    LMCacheConnectorV1Dynamic,
    in_process,
)
from lmcache_rbln.integration.vllm import private_names
from lmcache_rbln.integration.vllm.connector import RBLNLMCacheConnectorV1
from lmcache_rbln.paged_kv import RBLNPagedKVConnector

pytestmark = pytest.mark.npu

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def classes() -> list[tuple[type, type]]:
    return [
        (RBLNLMCacheConnectorV1, KVConnectorBase_V1),
        (RBLNLMCacheConnectorV1, LMCacheConnectorV1Dynamic),
        (RBLNPagedKVConnector, GPUConnectorInterface),
    ]


def arguments(function: Any) -> tuple[list[str], bool]:
    """Names of the positional arguments, and whether any keyword is taken."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind in _POSITIONAL]
    return names, any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters)


def test_nothing_is_abstract() -> None:
    for ours, _ in classes():
        assert not inspect.isabstract(ours)


def test_every_method_takes_what_the_base_classes_give() -> None:
    compared = []
    for ours, base in classes():
        for name, theirs in inspect.getmembers(base, inspect.isfunction):
            if name.startswith("_") and name != "__init__":
                continue
            mine = getattr(ours, name)
            if mine is theirs or name == "__init__" and base.__name__.startswith("GPU"):
                continue
            wanted, any_keyword = arguments(theirs)
            got, takes_any = arguments(mine)
            assert got == wanted, f"{ours.__name__}.{name}"
            assert takes_any >= any_keyword, f"{ours.__name__}.{name}"
            compared.append(name)
    assert {"register_kv_caches", "batched_to_gpu", "__init__"} <= set(compared)


def test_no_method_is_ours_alone_but_those_that_vllm_rbln_asks_for() -> None:
    for ours, base in classes():
        theirs = set(dir(base))
        if base.__name__ == "LMCacheConnectorV1Dynamic":
            theirs |= {"finalize_kv_cache_registration"}
        if base.__name__ != "KVConnectorBase_V1":
            public = {n for n in vars(ours) if not n.startswith("_")}
            assert public - theirs <= {"register"}


def test_vllm_rbln_finds_its_hook_and_the_class() -> None:
    theirs = rbln_lmcache_connector.RBLNLMCacheConnectorV1
    assert theirs is RBLNLMCacheConnectorV1
    assert issubclass(theirs, SupportsKVCacheRegistrationFinalize)


@pytest.mark.parametrize(
    "name",
    ["_manager", "_request_trackers", "_requests_priority"]
    + ["load_specs", "kv_caches", "device", "lookup_client", "lmcache_engine"],
)
def test_what_we_use_of_lmcache_s_adapter_is_there(name: str) -> None:
    impl = in_process("integration.vllm.vllm_v1_adapter").LMCacheConnectorV1Impl
    assert re.search(rf"self\.{name}\b|def {name}\(", inspect.getsource(impl))


def test_private_names_of_lmcache_are_these_and_in_one_module() -> None:
    private = r"(?:adapter|manager|engine|connector|tracker)\.(_[a-z]\w*)"
    source = inspect.getsource(private_names)
    used = {*re.findall(private, source), *re.findall(r'"(_\w+)"', source)}
    assert used == {
        "_init_failed_reason",
        "_lmcache_engine",
        "_manager",
        "_request_trackers",
        "_requests_priority",
    }
    theirs = "".join(
        inspect.getsource(in_process(name))
        for name in (
            "integration.vllm.lmcache_connector_v1",
            "integration.vllm.vllm_v1_adapter",
            "v1.manager",
        )
    )
    for name in used:
        assert f"self.{name}" in theirs
    for path in Path(private_names.__file__).parents[2].rglob("*.py"):
        if path.name != "private_names.py":
            text = path.read_text(encoding="utf-8")
            assert not re.findall(private, text), path
            assert not used & set(re.findall(r"\b_\w+", text)), path


def test_what_we_use_of_vllm_s_requests_is_there() -> None:
    source = inspect.getsource(Request.__init__)
    for name in (
        "num_computed_tokens",
        "num_stale_output_tokens",
        "num_in_flight_tokens",
        "drop_stale_output",
        "num_output_placeholders",
        "spec_token_ids",
        "cache_salt",
        "lora_request",
        "prompt_embeds",
        "kv_transfer_params",
        "skip_reading_prefix_cache",
    ):
        assert f"self.{name}" in source


def test_vllm_hashes_no_identity_that_we_do_not_know() -> None:
    """Or else LMCache would share KV where vLLM does not."""
    source = "".join(
        inspect.getsource(function)
        for name, function in inspect.getmembers(kv_cache_utils, inspect.isfunction)
        if name.endswith(("_extra_hash_keys", "_hash_extra_keys"))
    )
    read = set(re.findall(r"request\.([a-z]\w*)", source)) - {"lora_name", "lora_path"}
    assert read == {"cache_salt", "lora_request", "mm_features", "prompt_embeds"}
