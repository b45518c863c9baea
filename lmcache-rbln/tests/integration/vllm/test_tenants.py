# SPDX-License-Identifier: Apache-2.0
"""Tenants in LMCache's own engine: lookup, store, load, and after a restart."""

# Standard
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import uuid

# Third Party
from one_worker import CHUNK, PagedKV, engine_of
import pytest
import torch

# First Party
from lmcache.v1.config import LMCacheEngineConfig
from lmcache_rbln._lmcache import LMCacheEngine, in_process

pytestmark = pytest.mark.npu

PROMPT = list(range(100, 100 + 2 * CHUNK + 5))
WHOLE = 2 * CHUNK
TENANTS = ("tenant-A", "tenant-B", None)


class Line(PagedKV):
    """A paged KV cache of one number per token."""

    def __init__(self) -> None:
        self.kv = torch.zeros(len(PROMPT))

    def batched_from_gpu(
        self, objs: list[Any], starts: list[int], ends: list[int], **_: Any
    ) -> None:
        for obj, start, end in zip(objs, starts, ends, strict=True):
            obj.tensor[:] = self.kv[start:end].view(1, 1, -1, 1)

    def batched_to_gpu(
        self, objs: list[Any], starts: list[int], ends: list[int], **_: Any
    ) -> None:
        for obj, start, end in zip(objs, starts, ends, strict=True):
            self.kv[start:end] = obj.tensor[0, 0, :, 0]


class Tier:
    """LMCache's engine with a lookup client, as scheduler and worker have them."""

    def __init__(self, engine: LMCacheEngine, device: Line) -> None:
        self.engine = engine
        self.device = device
        client = in_process("v1.lookup_client.lmcache_lookup_client_bypass")
        self.client = client.LMCacheBypassLookupClient(
            engine.config, engine.metadata, engine
        )

    def ask(self, salt: str | None, value: float) -> int:
        """Answer the prompt for a tenant; returns the tokens that were found.

        What is found must be what this tenant stored; then ``value`` is stored.
        """
        # First Party
        from lmcache_rbln.integration.vllm.request_identity import terms_of

        asking = SimpleNamespace(
            cache_salt=salt,
            lora_request=None,
            kv_transfer_params=None,
            prompt_embeds=None,
            skip_reading_prefix_cache=False,
        )
        terms = terms_of(asking)
        request = uuid.uuid4().hex
        found = self.client.lookup(PROMPT, request, terms.lookup_configs())
        assert found is not None
        self.device.kv.zero_()
        if found:
            mask = self.engine.retrieve(
                PROMPT[:found], request_configs=terms.configs(), req_id=request
            )
            assert int(mask.sum()) == found
            assert self.device.kv[:found].tolist() == [value] * found
        self.engine.lookup_unpin(request)
        self.device.kv.fill_(value)
        self.engine.store(PROMPT, request_configs=terms.configs(), req_id=request)
        return found


@contextmanager
def tier_of(algorithm: str, **settings: Any) -> Iterator[Tier]:
    device = Line()
    settings |= {"save_unfull_chunk": False, "pre_caching_hash_algorithm": algorithm}
    with engine_of(device, **settings) as engine:
        yield Tier(engine, device)


@pytest.fixture(params=["builtin", "sha256_cbor"])
def algorithm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LMCACHE_PRE_CACHING_HASH_ALGORITHM", request.param)
    return str(LMCacheEngineConfig.from_env().pre_caching_hash_algorithm)


@pytest.fixture
def cpu(algorithm: str) -> Iterator[Tier]:
    with tier_of(algorithm) as tier:
        yield tier


def test_tenants_are_apart_in_host_memory(cpu: Tier) -> None:
    assert [cpu.ask(salt, i) for i, salt in enumerate(TENANTS)] == [0, 0, 0]
    assert [cpu.ask(salt, i) for i, salt in enumerate(TENANTS)] == [WHOLE] * 3


def test_tenants_are_apart_on_a_tier_that_outlives_the_engine(tmp_path: Path) -> None:
    # What LMCache has written behind is there once the engine has ended.
    for found in (0, WHOLE):
        with tier_of(
            "builtin", remote_url=f"fs://host:0/{tmp_path}", local_cpu=False
        ) as tier:
            hits = [tier.ask(salt, i) for i, salt in enumerate(TENANTS)]
            assert hits == [found] * 3
            assert tier.ask("tenant-C", 9) == found


def collision(database: Any) -> tuple[list[int], list[int]]:
    """Two chunks of different tokens with one hash, if the hash is Python's own.

    Python hashes an integer as its remainder by 2**61 - 1.
    """
    chunk = list(range(CHUNK))
    return chunk, [chunk[0] + 2**61 - 1, *chunk[1:]]


def test_sha256_cbor_is_what_the_documentation_recommends(
    cpu: Tier, algorithm: str
) -> None:
    """Python's hash is made for speed: who knows the seed can make collisions."""
    database: Any = cpu.engine.token_database
    one, other = collision(database)
    equal = database._hash_tokens(one) == database._hash_tokens(other)
    assert equal == (algorithm == "builtin")
