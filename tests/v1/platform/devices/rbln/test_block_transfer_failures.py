# SPDX-License-Identifier: Apache-2.0
"""Transfers that fail midway: what they leave behind, and who is told."""

# Standard
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock
import random
import signal
import threading

# Third Party
from kv_reference import (
    LAYOUTS,
    Case,
    Layout,
    assert_same_bytes,
    check_both_directions,
    move,
    random_bits,
    transfer,
    upload,
)
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# First Party
from lmcache import kv_transpose
from lmcache.v1.platform.devices.rbln import block_transfer, lanes, staging
from lmcache.v1.platform.devices.rbln.staging import Lease, StagingArena

pytestmark = [pytest.mark.npu, pytest.mark.deferred]

CASE = Case("blocks_first", 8, 4, 4, 128, 64, torch.float16)
DEVICE = torch.device("rbln:0")
BUFFERS = 2


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[StagingArena]:
    """A small arena, so that transfers reuse buffers and losses show."""
    small = StagingArena(BUFFERS, 2)
    monkeypatch.setattr(staging, "_process_arena", small)
    # One layer's block a buffer: a batch per layer.
    monkeypatch.setattr(staging, "BUFFER_BYTES", 2 * 4 * 128 * 64 * 2)
    yield small
    small.close()


class FailAt(TorchDispatchMode):
    """Makes the device copy of the ``count``-th piece fail, after real ones."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._left = count

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._foreach_copy_.default:
            self._left -= len(args[0])
            if self._left <= 0:
                raise RuntimeError("planted")
        return func(*args, **(kwargs or {}))


def whole_capacity(arena: StagingArena) -> None:
    """Show that all buffers can be leased."""
    assert arena.in_use() == (0, 0)
    lease = Lease(DEVICE, BUFFERS)
    try:
        arena.acquire(lease)
        assert len({buffer.data_ptr() for buffer in lease.buffers}) == BUFFERS
    finally:
        arena.release(lease)


@pytest.mark.parametrize("to_chunks", [True, False])
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_a_failed_transfer_is_drained_and_gives_its_buffers_back(
    arena: StagingArena, to_chunks: bool, count: int
) -> None:
    layers = [random_bits(CASE.layer_shape, CASE.dtype, i) for i in range(8)]
    device_layers = [upload(layer, "rbln:0") for layer in layers]
    chunk = random_bits(CASE.chunk_shape(128), CASE.dtype, 9)
    with pytest.raises(RuntimeError, match="planted"), FailAt(count):
        transfer(CASE, to_chunks, device_layers, [chunk], [2], 128)
    assert all(lane.stream.query() for lane in arena._lanes.by_device[DEVICE])
    whole_capacity(arena)
    # The next transfer through the same buffers is right.
    device_layers = [upload(layer, "rbln:0") for layer in layers]
    wanted = [torch.zeros_like(chunk)]
    got = [torch.zeros_like(chunk)]
    move(CASE, True, layers, wanted, [1], 128)
    transfer(CASE, True, device_layers, got, [1], 128)
    assert_same_bytes(got, wanted)


def not_drained(*_: object) -> None:
    raise kv_transpose.NotDrained("the reason")


def with_run(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    native = MagicMock(wraps=kv_transpose, NotDrained=kv_transpose.NotDrained)
    native.run = function
    monkeypatch.setattr(block_transfer, "kv_transpose", lambda: native)


@pytest.mark.parametrize("to_host", [True, False])
def test_staging_that_was_not_drained_is_taken_back_later(
    arena: StagingArena, monkeypatch: pytest.MonkeyPatch, to_host: bool
) -> None:
    layers = [upload(torch.zeros(CASE.layer_shape).half(), "rbln:0") for _ in range(8)]
    chunk = torch.zeros(CASE.chunk_shape(128)).half()
    # The caller must not take the blocks for free.
    said = f"in flight.*may still {'read' if to_host else 'write'} blocks.*the reason"
    with monkeypatch.context() as patch:
        with_run(patch, not_drained)
        with pytest.raises(block_transfer.StillInFlightError, match=said):
            transfer(CASE, to_host, layers, [chunk], [0], 128)
    # The device is well, so a probe tells so, once it is through.
    while arena.in_use() != (0, 0):
        torch.rbln.synchronize(DEVICE)
    whole_capacity(arena)
    transfer(CASE, True, layers, [chunk], [0], 128)


def test_chunks_that_the_device_may_still_use_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("mla", 1, 8, dtype=torch.float16)
    layer = upload(torch.zeros(case.layer_shape).half(), "rbln:0")
    chunk = torch.zeros(case.chunk_shape(8), dtype=case.dtype, pin_memory=True)
    arena = StagingArena(1, 1)
    monkeypatch.setattr(staging, "_process_arena", arena)
    with_run(monkeypatch, not_drained)
    with pytest.raises(RuntimeError, match="memory of the chunks. Do not reuse"):
        transfer(case, True, [layer], [chunk], [4, 1], 8)
    # Nor is it freed, whatever the caller does.
    [lease] = arena._leases
    assert lease.plan.in_place
    # Its probe is not in flight any more when its memory goes.
    while arena.in_use() != (0, 0):
        torch.rbln.synchronize(DEVICE)


@pytest.mark.parametrize("to_chunks", [True, False])
def test_capacity_comes_back_after_interrupts(
    arena: StagingArena, to_chunks: bool
) -> None:
    """By a signal at any time, as Ctrl-C: bytes are right, and nothing is lost."""
    layers = [random_bits(CASE.layer_shape, CASE.dtype, i) for i in range(8)]
    device_layers = [upload(layer, "rbln:0") for layer in layers]
    stored = [torch.zeros(CASE.chunk_shape(128), dtype=CASE.dtype)]
    move(CASE, True, layers, stored, [2], 128)
    chance = random.Random(5)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    struck = 0
    try:
        for _ in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 3e-3))
                transfer(CASE, to_chunks, device_layers, stored, [2], 128)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                struck += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    while arena.in_use() != (0, 0):
        torch.rbln.synchronize(DEVICE)
    whole_capacity(arena)
    got = [torch.zeros_like(stored[0])]
    transfer(CASE, True, device_layers, got, [2], 128)
    assert_same_bytes(got, stored)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_caller_s_stream_may_be_any_of_the_device_s(layout: Layout) -> None:
    """A transfer never shares its stream with the caller, whose work is before it."""
    case = Case(layout, 2, 6)
    for _ in range(lanes.STREAM_POOL + 1):
        with torch.rbln.stream(torch.rbln.Stream("rbln:0")):
            check_both_directions(case, "rbln:0", [4, 0, 5, 1], 2)


def test_a_transfer_is_behind_what_the_caller_s_stream_has_to_do() -> None:
    case = Case("kv_first", 2, 6)
    layers = [
        upload(torch.zeros(case.layer_shape, dtype=case.dtype), "rbln:0")
        for _ in range(2)
    ]
    stream = torch.rbln.Stream("rbln:0")
    for seed in range(20):
        new = [random_bits(case.layer_shape, case.dtype, seed + i) for i in range(2)]
        pinned = [layer.pin_memory() for layer in new]
        got = [torch.zeros(case.chunk_shape(8), dtype=case.dtype)]
        wanted = [torch.zeros_like(got[0])]
        with torch.rbln.stream(stream):
            for layer, values in zip(layers, pinned, strict=True):
                layer.copy_(values, non_blocking=True)
            transfer(case, True, layers, got, [3, 1], 8)
        move(case, True, new, wanted, [3, 1], 8)
        assert_same_bytes(got, wanted)


@pytest.mark.parametrize("missing", ["Stream, Event, current_stream", "pinned memory"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_streams_copies_are_synchronous_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, missing: str
) -> None:
    warning = MagicMock()
    monkeypatch.setattr(lanes.logger, "warning", warning)
    monkeypatch.setattr(staging, "_process_arena", None)
    if missing == "pinned memory":
        empty = torch.empty

        def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            if pin_memory:
                raise RuntimeError("no allocator")
            return empty(*args, **kwargs)

        monkeypatch.setattr(torch, "empty", unpinned)
    else:
        for name in missing.split(", "):
            monkeypatch.delattr(torch.rbln, name)
    lanes.supports_async_copies.cache_clear()
    try:
        for seed in range(3):
            case = Case(layout, 3, 6)
            check_both_directions(case, "rbln:0", [4, 0, 5, 1], 2, seed=seed)
    finally:
        lanes.supports_async_copies.cache_clear()
    warning.assert_called_once()
    said = warning.call_args.args[0] % warning.call_args.args[1:]
    assert missing in said
    assert "synchronously" in said
    assert "torch-rbln" in said


def test_eight_threads_stay_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    real = staging.make_buffer

    def make_buffer() -> torch.Tensor:
        made.append(real())
        return made[-1]

    monkeypatch.setattr(staging, "make_buffer", make_buffer)
    arena = StagingArena(3, 8)
    monkeypatch.setattr(staging, "_process_arena", arena)
    case = Case("kv_first", 4, 9, 4, 256, 64, torch.float16)
    layers = [
        upload(random_bits(case.layer_shape, case.dtype, i), "rbln:0") for i in range(4)
    ]
    start = threading.Barrier(8)

    def work(thread: int) -> None:
        chunk = torch.empty(case.chunk_shape(256), dtype=case.dtype)
        start.wait()
        with torch.rbln.stream(torch.rbln.Stream("rbln:0")):
            for _ in range(3):
                transfer(case, True, layers, [chunk], [thread], 256)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert arena.in_use() == (0, 0)
    assert 1 <= len(made) <= 3
    arena.close()
