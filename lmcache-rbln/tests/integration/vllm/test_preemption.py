# SPDX-License-Identifier: Apache-2.0
"""vLLM-RBLN's schedulers out of blocks, over a model that any wrong KV makes wrong.

Scheduler, block pool, prefix cache and the connector's scheduler side are real. Worker,
LMCache's storage and the model are a few lines each: the KV of a token is a hash of the
token and of the KV before it, read through the block table that a model runner keeps,
and the next token is made of the last KV. So an answer is that of the request alone
exactly if every block was the right one.
"""

# Standard
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import random

# Third Party
from scheduler_side import scheduler_side
import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
import torch

# First Party
from tests.support.serving import tiny_models

pytestmark = pytest.mark.npu

BLOCK, CHUNK, BLOCKS = 16, 32, 14
ANSWER = 100
NAME = "RBLNLMCacheConnectorV1"


def kv_of(before: int, token: int) -> int:
    """The KV of a token behind others."""
    return hash((before, token))


def alone(prompt: list[int], tokens: int) -> list[int]:
    """The answer of a request that has everything to itself."""
    kv, answer = 0, list[int]()
    for token in prompt:
        kv = kv_of(kv, token)
    while len(answer) < tokens:
        answer.append(kv % 500)
        kv = kv_of(kv, answer[-1])
    return answer


class Storage:
    """LMCache's chunks, as lookup client and as worker."""

    def __init__(self) -> None:
        self.chunks: dict[Any, list[int]] = {}
        self.loaded = 0

    def lookup_cache(self, lookup_id: str) -> int:
        return -1

    def clear_lookup_status(self, lookup_id: str) -> None:
        pass

    def lookup(self, token_ids: Any, lookup_id: str, request_configs: Any) -> int:
        for end in range(CHUNK, len(token_ids) + 1, CHUNK):
            if self.key(token_ids, end, request_configs) not in self.chunks:
                return end - CHUNK
        return len(token_ids) // CHUNK * CHUNK

    def load(self, request: Any, kv: list[int]) -> None:
        """Write what was found into the request's slots."""
        if request.load_spec is None or not request.load_spec.can_load:
            return
        slots = request.slot_mapping.tolist()
        first = request.load_spec.vllm_cached_tokens // CHUNK * CHUNK
        for start in range(first, request.load_spec.lmcache_cached_tokens, CHUNK):
            key = self.key(request.token_ids, start + CHUNK, request.request_configs)
            for offset, value in enumerate(self.chunks[key]):
                kv[slots[start + offset]] = value
            self.loaded += 1

    def store(self, request: Any, kv: list[int]) -> None:
        """Keep the request's whole chunks."""
        if request.save_spec is None or not request.save_spec.can_save:
            return
        slots = request.slot_mapping.tolist()
        for start in range(0, len(request.token_ids) - CHUNK + 1, CHUNK):
            key = self.key(request.token_ids, start + CHUNK, request.request_configs)
            self.chunks[key] = [kv[slot] for slot in slots[start : start + CHUNK]]

    def key(self, token_ids: Any, end: int, configs: Any) -> Any:
        return tuple(token_ids[:end]), str(configs)


class Runner:
    """A model runner: it keeps the very lists that the scheduler's output has.

    Args:
        storages: Of each of our connectors.
    """

    def __init__(self, storages: list[Storage]) -> None:
        self.storages = storages
        self.kv = [0] * (BLOCKS * BLOCK)
        self.blocks: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}

    def run(self, output: Any) -> Any:
        """Compute one step."""
        computed = {}
        for new in output.scheduled_new_reqs:
            self.blocks[new.req_id] = new.block_ids[0]
            self.tokens[new.req_id] = list(new.prompt_token_ids)
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, blocks, done in zip(
            cached.req_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            strict=True,
        ):
            computed[name] = done
            if name in cached.resumed_req_ids:
                self.blocks[name] = blocks[0]
            elif blocks is not None:
                self.blocks[name].extend(blocks[0])
        metadata = output.kv_connector_metadata
        # Of each connector inside of MultiConnector.
        parts = getattr(metadata, "metadata", (metadata,))
        for storage, part in zip(self.storages, parts, strict=True):
            for request in part.requests:
                storage.load(request, self.kv)
        names = list(output.num_scheduled_tokens)
        sampled = [
            self.compute(name, computed[name], output.num_scheduled_tokens[name])
            for name in names
        ]
        for storage, part in zip(self.storages, parts, strict=True):
            for request in part.requests:
                storage.store(request, self.kv)
        places = {name: place for place, name in enumerate(names)}
        return ModelRunnerOutput(names, places, sampled)

    def compute(self, name: str, start: int, count: int) -> list[int]:
        """Compute tokens of one request; returns the next one if all are."""
        blocks, tokens = self.blocks[name], self.tokens[name]

        def slot(place: int) -> int:
            return blocks[place // BLOCK] * BLOCK + place % BLOCK

        for place in range(start, start + count):
            before = self.kv[slot(place - 1)] if place else 0
            self.kv[slot(place)] = kv_of(before, tokens[place])
        if start + count < len(tokens):
            return []
        tokens.append(self.kv[slot(start + count - 1)] % 500)
        return [tokens[-1]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("qwen3", tmp_path_factory.mktemp("models"))


def scheduler_of(model: Path, asynchronous: bool, connector: Any) -> tuple[Any, Any]:
    """The scheduler that ``vllm serve`` would have, and what hashes its blocks."""
    config = EngineArgs(
        model=str(model),
        model_impl="vllm",
        block_size=BLOCK,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=BLOCK,
        num_gpu_blocks_override=BLOCKS,
        enable_prefix_caching=True,
        async_scheduling=asynchronous,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float16
    )
    blocks = KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    init_none_hash(sha256)
    kind: Any = config.scheduler_config.get_scheduler_cls()
    grammar = SimpleNamespace(accept_tokens=lambda request, tokens: True)
    made = kind(config, blocks, grammar, BLOCK, log_stats=True)
    if isinstance(connector, list):
        connector = inside_multi(config, connector)
    made.connector = connector
    connector.bind_kv_cache_manager(made.kv_cache_manager)
    return made, get_request_block_hasher(BLOCK, sha256)


def inside_multi(config: Any, connectors: list[Any]) -> Any:
    """vLLM's ``MultiConnector`` over connectors of ours."""
    children = iter(connectors)
    blocks: Any = None

    class Multi(MultiConnector):
        @classmethod
        def _get_connector_classes_and_configs(cls, vllm_config: Any) -> Any:
            return [(lambda *_: next(children), vllm_config) for _ in connectors]

    extra = {
        "connectors": [{"kv_connector": NAME, "kv_role": "kv_both"} for _ in connectors]
    }
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    return Multi(config, KVConnectorRole.SCHEDULER, blocks)


def request_of(name: str, prompt: list[int], tokens: int, hasher: Any) -> Any:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return Request(name, list(prompt), params, None, block_hasher=hasher)


def answer_together(
    scheduler: Any, runner: Runner, requests: list[Any], ahead: int
) -> dict[str, list[int]]:
    """Run requests to their ends, with up to ``ahead`` steps on their way."""
    answers: dict[str, list[int]] = {r.request_id: [] for r in requests}
    for request in requests:
        scheduler.add_request(request)
    under_way: deque[Any] = deque()
    steps = 0
    while scheduler.has_unfinished_requests() or under_way:
        steps += 1
        assert steps < 5000, "no end"
        output = scheduler.schedule()
        under_way.append(output)
        while len(under_way) > ahead or (
            under_way and not output.total_num_scheduled_tokens
        ):
            oldest = under_way.popleft()
            updates = scheduler.update_from_output(oldest, runner.run(oldest))
            for update in updates.values():
                for one in update.outputs:
                    answers[one.request_id] += one.new_token_ids
    return answers


@pytest.mark.parametrize(
    ("asynchronous", "rounds", "inside"),
    [(False, 40, 0), (True, 200, 0), (True, 40, 2)],
    ids=["sync", "async", "two inside MultiConnector"],
)
def test_answers_are_those_of_each_alone(
    model: Path, asynchronous: bool, rounds: int, inside: int
) -> None:
    storages = [Storage() for _ in range(inside or 1)]
    connectors = [scheduler_side(storage, BLOCK, CHUNK) for storage in storages]
    scheduler, hasher = scheduler_of(
        model, asynchronous, connectors if inside else connectors[0]
    )
    runner = Runner(storages)
    chance = random.Random(5)
    pool = [
        [chance.randrange(500) for _ in range(length)]
        for length in (15, 16, 31, 32, 33, 40, 47, 48, 62, 64, 65, 90)
    ]
    pool += [[*prompt[: len(prompt) // 2], *pool[0]] for prompt in pool]
    preempted = 0
    for number in range(rounds):
        prompts = chance.sample(pool, chance.randint(4, 8))
        requests = [
            request_of(f"{number}-{i}", prompt, chance.randint(1, ANSWER), hasher)
            for i, prompt in enumerate(prompts)
        ]
        got = answer_together(scheduler, runner, requests, int(asynchronous))
        for prompt, request in zip(prompts, requests, strict=True):
            want = alone(prompt, request.max_tokens)
            assert got[request.request_id] == want, f"round {number}"
            preempted += request.num_preemptions
        if number % 10 == 9:
            # Or the storages would soon hold everything; one at a time.
            storages[number // 10 % len(storages)].chunks.clear()
    loaded = [storage.loaded for storage in storages]
    assert preempted > rounds and sum(loaded) > rounds and min(loaded) > 0
    assert not any(connector._views for connector in connectors)
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert free == BLOCKS - 1
    print(f"{preempted} preemptions, {loaded} chunks loaded")
