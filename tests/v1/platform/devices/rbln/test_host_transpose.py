# SPDX-License-Identifier: Apache-2.0
"""The transposition on the host: native and torch's, byte by byte."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import MagicMock
import os
import sys

# Third Party
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_reference import LAYOUTS, Case, Layout, check_both_directions
import numpy as np
import pytest
import torch

# First Party
from lmcache import kv_transpose
from lmcache.v1.platform.devices.rbln import native
from lmcache.v1.platform.devices.rbln.host_transpose import (
    THREADS_ENV_VAR,
    TorchTransposition,
    transpose_threads,
)
from lmcache.v1.platform.devices.rbln.native import TILE_COLUMNS

DTYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32, 8: torch.int64}


class NativeTransposition:
    """The extension with the interface of torch's."""

    def __init__(self, chunk_views: list[torch.Tensor], threads: int) -> None:
        heads, head_size = chunk_views[0].shape[3:]
        self._row_bytes = head_size * chunk_views[0].element_size()
        self._threads = threads
        self._chunks = [
            view.as_strided(
                (*view.shape[:3], heads * head_size), (*view.stride()[:3], 1)
            )
            .view(torch.uint8)
            .numpy()
            for view in chunk_views
        ]

    def gather(self, staging: torch.Tensor, tiles: np.ndarray) -> None:
        kv_transpose.gather(
            staging.numpy(), self._chunks, self._row_bytes, tiles, self._threads
        )

    def scatter(self, staging: torch.Tensor, tiles: np.ndarray) -> None:
        kv_transpose.scatter(
            staging.numpy(), self._chunks, self._row_bytes, tiles, self._threads
        )


@pytest.fixture(autouse=True)
def fresh_settings() -> Iterator[None]:
    """Let each test find the extension and read the setting anew."""
    native.kv_transpose.cache_clear()
    transpose_threads.cache_clear()
    yield
    native.kv_transpose.cache_clear()
    transpose_threads.cache_clear()


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw chunks of any strides and alignment, and tiles that share no byte."""
    itemsize = draw(st.sampled_from(sorted(DTYPES)))
    planes = draw(st.integers(1, 2))
    layers = draw(st.integers(1, 3))
    tokens = draw(st.integers(1, 24))
    heads = draw(st.integers(1, 5))
    size = draw(st.sampled_from([1, 2, 3, 5, 8, 16, 17, 32, 40, 64]))
    # Elements between tokens, between layers, between planes, before the first.
    gaps = [draw(st.integers(0, 3)) * draw(st.sampled_from([1, 8])) for _ in range(4)]
    tiles = []
    staged = itemsize * draw(st.integers(0, 3))
    for chunk in range(2):
        for layer in draw(st.permutations(range(layers))):
            plane = draw(st.integers(0, planes - 1))
            head = draw(st.integers(0, heads - 1))
            slots = draw(st.integers(1, tokens))
            blocks = draw(st.integers(1, tokens // slots))
            tile = {
                "staged": staged,
                "chunk": chunk,
                "layer": layer,
                "plane": plane,
                "planes": draw(st.integers(1, planes - plane)),
                "token": draw(st.integers(0, tokens - blocks * slots)),
                "blocks": blocks,
                "slots": slots,
                "head": head,
                "heads": draw(st.integers(1, heads - head)),
            }
            tiles.append([tile[name] for name in TILE_COLUMNS])
            counts = ("planes", "blocks", "slots", "heads")
            staged += int(np.prod([tile[name] for name in counts])) * size * itemsize
    return {
        "dtype": DTYPES[itemsize],
        "shape": (planes, layers, tokens, heads, size),
        "gaps": gaps,
        "tiles": np.array(tiles, dtype=np.int64),
        "staging_bytes": staged,
        "threads": draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 1 << 20)),
    }


def random_bytes(count: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(
        np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    )


def chunk_views(job: dict[str, Any], storages: list[torch.Tensor]) -> list:
    """Return the chunks of a job as views of some storages."""
    _, layers, tokens, heads, size = job["shape"]
    token_gap, layer_gap, plane_gap, start = job["gaps"]
    token = heads * size + token_gap
    layer = tokens * token + layer_gap
    strides = (layers * layer + plane_gap, layer, token, size, 1)
    return [
        storage.view(job["dtype"]).as_strided(job["shape"], strides, start)
        for storage in storages
    ]


@given(job=jobs(), gathers=st.booleans())
@settings(max_examples=400, deadline=None)
def test_native_and_torch_write_the_same_bytes(
    job: dict[str, Any], gathers: bool
) -> None:
    itemsize = job["dtype"].itemsize
    planes, layers, tokens, heads, size = job["shape"]
    token_gap, layer_gap, plane_gap, start = job["gaps"]
    layer = tokens * (heads * size + token_gap) + layer_gap
    count = (start + planes * (layers * layer + plane_gap)) * itemsize
    results = []
    for natively in (True, False):
        storages = [random_bytes(count, job["seed"] + i) for i in range(2)]
        views = chunk_views(job, storages)
        staging = random_bytes(job["staging_bytes"], job["seed"] + 2)
        host = (
            NativeTransposition(views, job["threads"])
            if natively
            else TorchTransposition(views)
        )
        (host.gather if gathers else host.scatter)(staging, job["tiles"])
        results.append([*storages, staging])
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(got, wanted)


def test_against_plain_indexing() -> None:
    """Both could be wrong in the same way; unique values and plain numpy can't."""
    planes, layers, tokens, heads, size = 2, 3, 12, 4, 8
    chunk = torch.zeros(planes, layers, tokens, heads, size, dtype=torch.int32)
    # Two blocks of three slots: heads 1 and 2 of both planes, from token 5 on.
    staged = torch.arange(2 * 2 * 2 * 3 * size, dtype=torch.int32)
    tile = {"layer": 1, "planes": 2, "token": 5, "blocks": 2, "slots": 3, "head": 1}
    tile |= {"heads": 2, "staged": 0, "chunk": 0, "plane": 0}
    tiles = np.array([[tile[name] for name in TILE_COLUMNS]], dtype=np.int64)
    wanted = np.zeros(chunk.shape, dtype=np.int32)
    source = staged.view(2, 2, 2, 3, size).numpy()
    for block in range(2):
        for plane in range(2):
            for head in range(2):
                for slot in range(3):
                    wanted[plane, 1, 5 + block * 3 + slot, 1 + head] = source[
                        block, plane, head, slot
                    ]
    host = NativeTransposition([chunk], 1)
    host.gather(staged.view(torch.uint8), tiles)
    assert np.array_equal(chunk.numpy(), wanted)
    back = torch.zeros_like(staged)
    host.scatter(back.view(torch.uint8), tiles)
    assert torch.equal(back, staged)


STAGING = np.zeros(64, dtype=np.uint8)
CHUNK = np.zeros((2, 3, 8, 8), dtype=np.uint8)
TILES = np.array([[0, 0, 2, 0, 2, 4, 2, 2, 0, 2]], dtype=np.int64)


def read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"staging": STAGING.view(np.int8)}, "staging as a numpy array of uint8"),
        ({"staging": STAGING[::2]}, "dense"),
        ({"staging": STAGING.reshape(8, 8)}, "one axis"),
        ({"staging": bytes(64)}, "numpy array of uint8"),
        ({"staging": STAGING[:63]}, "tile 0 .* staging buffer of 63 bytes"),
        ({"chunks": []}, "tile 0 .* one of the 0 chunks"),
        ({"chunks": [CHUNK.view(np.int16)]}, "chunk 0 as a numpy array of uint8"),
        ({"chunks": [CHUNK[0]]}, "chunk 0 of shape"),
        ({"chunks": [CHUNK[..., ::-1]]}, "dense last axis"),
        ({"chunks": [CHUNK, CHUNK[..., :4]]}, "chunk 1 of shape"),
        ({"chunks": [CHUNK[:1]]}, "tile 0"),
        ({"row_bytes": 3}, "heads \\* 3"),
        ({"row_bytes": 0}, "row_bytes"),
        ({"tiles": TILES.astype(np.int32)}, "int64"),
        ({"tiles": TILES[:, :9]}, "shape"),
        ({"tiles": np.asfortranarray(np.repeat(TILES, 2, 0))}, "dense"),
        ({"tiles": TILES + 1}, "tile 0"),
        ({"threads": 0}, "threads"),
    ],
)
@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_bad_arguments_move_nothing(
    name: str, change: dict[str, Any], says: str
) -> None:
    arguments = {"staging": STAGING, "chunks": [CHUNK], "row_bytes": 4, "tiles": TILES}
    with pytest.raises(ValueError, match=says):
        getattr(kv_transpose, name)(**(arguments | change))


def test_destinations_must_be_writable() -> None:
    with pytest.raises(ValueError, match="chunk 0 to be writable"):
        kv_transpose.gather(STAGING, [read_only(CHUNK)], 4, TILES)
    with pytest.raises(ValueError, match="staging to be writable"):
        kv_transpose.scatter(read_only(STAGING), [CHUNK], 4, TILES)
    # What is only read may be read-only.
    kv_transpose.gather(read_only(STAGING), [CHUNK.copy()], 4, TILES)
    kv_transpose.scatter(STAGING.copy(), [read_only(CHUNK)], 4, TILES)


def test_threads_share_the_helpers() -> None:
    chunk = torch.zeros(2, 2, 512, 8, 64, dtype=torch.int16)
    staged = torch.arange(8 * 512 * 64, dtype=torch.int32).to(torch.int16)
    tiles = [[0, 0, i // 2, i % 2, 1, 0, 1, 512, 0, 8] for i in range(4)]
    wanted = staged.view(8, 512, 64).transpose(0, 1)
    host = NativeTransposition([chunk], 3)

    def work(tile: list[int]) -> None:
        for _ in range(50):
            chunk[tile[3], tile[2]].zero_()
            host.gather(staged.view(torch.uint8), np.array([tile], dtype=np.int64))
            assert torch.equal(chunk[tile[3], tile[2]], wanted)

    with ThreadPoolExecutor(4) as executor:
        for result in [executor.submit(work, tile) for tile in tiles]:
            result.result()


@pytest.mark.deferred
@pytest.mark.npu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_takes_over_and_says_so_once(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    warning = MagicMock()
    monkeypatch.setattr(native.logger, "warning", warning)
    # What importing a module that is not there, or does not load, looks like.
    monkeypatch.setitem(sys.modules, "lmcache.kv_transpose", None)
    for seed in range(3):
        case = Case(layout, 3, 6, dtype=torch.float16)
        check_both_directions(
            case, "rbln:0", [4, 0, 5, 1], 2, partial_tokens=3, seed=seed
        )
    warning.assert_called_once()
    said = warning.call_args.args[0] % warning.call_args.args[1:]
    assert "lmcache.kv_transpose" in said
    assert "slower" in said


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 1), (3, 2), (5, 4), (64, 4)])
def test_copies_keep_a_cpu(
    monkeypatch: pytest.MonkeyPatch, cpus: int, threads: int
) -> None:
    monkeypatch.delenv(THREADS_ENV_VAR, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    assert transpose_threads() == threads


def test_the_threads_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert THREADS_ENV_VAR == "LMCACHE_RBLN_TRANSPOSE_THREADS"
    monkeypatch.setenv(THREADS_ENV_VAR, " 7 ")
    assert transpose_threads() == 7
    for raw in ("0", "-1", "two", "1.5", "²", "65", "100000"):
        transpose_threads.cache_clear()
        monkeypatch.setenv(THREADS_ENV_VAR, raw)
        with pytest.raises(ValueError, match=THREADS_ENV_VAR):
            transpose_threads()
