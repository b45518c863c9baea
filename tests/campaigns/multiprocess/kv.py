# SPDX-License-Identifier: Apache-2.0
"""A KV cache of which it is known what each block must hold.

That is a function of tenant, prefix, layer, plane, head, token and dimension alone. A
copy on the host has what is wanted, written by plain indexing.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
import functools
import random
import zlib

# Third Party
import numpy as np
import torch

LAYERS, HEAD, BLOCK, CHUNK, BLOCKS = 2, 8, 4, 8, 600
TENANTS, PROMPTS, LONGEST, COMMON = ("", "a", "b"), 8, 32, 10


@functools.cache
def tokens_of(prompt: int) -> list[int]:
    """Tokens of a prompt, ``LONGEST`` chunks; two each begin alike."""
    own = 1000 * (50 + prompt)
    return [
        (1000 * (prompt // 2) if at < COMMON * CHUNK else own) + at
        for at in range(LONGEST * CHUNK)
    ]


@functools.cache
def kv_of(tenant: str, prompt: int, planes: int, heads: int) -> np.ndarray:
    """Bits of a prompt's KV: ``[tokens, layers, planes, heads, dim]``, 16 bit each."""
    prefixes, prefix = [], zlib.crc32(tenant.encode())
    for token in tokens_of(prompt):
        prefix = zlib.crc32(token.to_bytes(4, "big"), prefix)
        prefixes.append(prefix)
    place = np.arange(1, 1 + LAYERS * planes * heads * HEAD, dtype=np.uint64)
    mixed = np.array(prefixes, np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed + place) * np.uint64(0xD1B54A32D192ED03)
    bits = (mixed >> np.uint64(40)).astype(np.uint16).view(np.int16)
    return bits.reshape(-1, LAYERS, planes, heads, HEAD)


@dataclass
class Job:
    """A store or a load of a request: tokens from ``start`` to ``end``.

    Attributes:
        skip: Leading tokens that a load does not write.
        reported: Whether it has ended.
    """

    name: str
    load: bool
    tenant: str
    prompt: int
    start: int = 0
    end: int = 0
    skip: int = 0
    blocks: list[int] = field(default_factory=list)
    reported: bool = False


class KVCache:
    """Layers on the NPU, and what they must hold.

    Args:
        layout: As ``tests.support.kv_reference`` names it.
        later: Whether the engine's copies are asynchronous, as a forward is.
    """

    def __init__(self, layout: str, later: bool) -> None:
        self._layout, self._later = layout, later
        self._planes, self._heads = (1, 1) if layout == "mla" else (2, 2)
        inner = (self._heads, 1, BLOCK, HEAD)
        shape = {
            "mla": (BLOCKS, BLOCK, HEAD),
            "kv_first": (2, BLOCKS, *inner),
            "blocks_first": (BLOCKS, 2, *inner),
        }[layout]
        self._host = [np.zeros(shape, np.int16) for _ in range(LAYERS)]
        self.layers = [
            torch.empty(shape, dtype=torch.bfloat16, device="rbln:0")
            for _ in range(LAYERS)
        ]
        for layer in self.layers:
            torch.rbln.bind_device_memory(layer)
            _again(layer.zero_)
        self.free = list(range(BLOCKS))
        # What may still be copied.
        self._sources: list[torch.Tensor] = []

    def allocate(self, rng: random.Random, job: Job) -> bool:
        """Give a request its blocks, if there are enough."""
        count = (job.end - job.start) // BLOCK
        if count > len(self.free):
            return False
        rng.shuffle(self.free)
        job.blocks = [self.free.pop() for _ in range(count)]
        return True

    def expect(self, job: Job) -> None:
        """Note what a request's blocks must hold."""
        kv = kv_of(job.tenant, job.prompt, self._planes, self._heads)
        for index, block in enumerate(job.blocks):
            first = job.start + index * BLOCK
            if index * BLOCK < job.skip:
                continue
            for layer, host in enumerate(self._host):
                for plane in range(self._planes):
                    for head in range(self._heads):
                        rows = kv[first : first + BLOCK, layer, plane, head]
                        if self._layout == "mla":
                            host[block] = rows
                        elif self._layout == "kv_first":
                            host[plane, block, head, 0] = rows
                        else:
                            host[block, plane, head, 0] = rows

    def compute(self, job: Job) -> None:
        """Write a request's blocks as a forward does, on the engine's stream."""
        self.expect(job)
        by_plane = self._layout == "kv_first"
        for layer, host in zip(self.layers, self._host, strict=True):
            for block in job.blocks:
                for at in [(0, block), (1, block)] if by_plane else [(block,)]:
                    source = torch.from_numpy(host[at].copy()).view(torch.bfloat16)
                    if self._later:
                        source = source.pin_memory()
                        self._sources.append(source)
                    to = layer[at]
                    _again(
                        functools.partial(to.copy_, source, non_blocking=self._later)
                    )

    def check(self, jobs: Sequence[Job], unknown: Sequence[int]) -> None:
        """Compare every block, except some that may hold anything.

        Args:
            jobs: For the message.
            unknown: Those blocks.

        Raises:
            AssertionError: If a byte is wrong.
        """
        by_plane = self._layout == "kv_first"
        got = [_again(layer.cpu).view(torch.int16).numpy() for layer in self.layers]
        self._sources.clear()
        for number, (layer, wanted) in enumerate(zip(got, self._host, strict=True)):
            at: Any = (slice(None), list(unknown)) if by_plane else list(unknown)
            layer[at] = wanted[at]
            if not np.array_equal(layer, wanted):
                bad = np.unique(np.argwhere(layer != wanted)[:, int(by_plane)]).tolist()
                of = [job for job in jobs if set(bad) & set(job.blocks)]
                raise AssertionError(f"layer {number}: wrong blocks {bad}, of {of}")


def _again(copy: Callable[[], Any]) -> Any:
    """Copy for the engine, whose own copies do not fail."""
    for _ in range(30):
        try:
            return copy()
        except RuntimeError as exc:
            failure = exc
    raise failure
