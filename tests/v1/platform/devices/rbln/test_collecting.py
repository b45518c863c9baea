# SPDX-License-Identifier: Apache-2.0
"""Pieces collected in device memory: the same bytes, fewer copies to the host."""

# Standard
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import MagicMock
import threading

# Third Party
from kv_reference import (
    LAYOUTS,
    Case,
    Layout,
    as_bytes,
    check_both_directions,
    check_inference_mode,
    random_bits,
    transfer,
    upload,
)
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# First Party
from lmcache import kv_transpose
from lmcache.v1.platform.devices.rbln import block_transfer, copy_costs, staging
from lmcache.v1.platform.devices.rbln.staging import Lease, StagingArena

pytestmark = [pytest.mark.npu, pytest.mark.deferred]


class HostCopies(TorchDispatchMode):
    """Counts copies between host and device, whoever issues them through torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.count += args[0].device.type != args[1].device.type
        elif func is torch.ops.aten._foreach_copy_.default:
            self.count += len(args[0])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def collecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Make every transfer collect its pieces; yields each one's host copies."""
    monkeypatch.setattr(block_transfer, "MIN_SEGMENTS_TO_COLLECT", 2)
    monkeypatch.setattr(block_transfer, "_collecting_pays", lambda *_: True)
    monkeypatch.setattr(copy_costs, "_measured", {torch.device("rbln:0"): 17.0})
    arena = StagingArena(16, 8)
    monkeypatch.setattr(staging, "_process_arena", arena)
    host_copies: list[int] = []
    real = block_transfer._run

    def counted(*arguments: Any) -> None:
        with HostCopies() as copies:
            real(*arguments)
        host_copies.append(copies.count)

    monkeypatch.setattr(block_transfer, "_run", counted)
    yield host_copies
    assert arena.in_use() == (0, 0)
    arena.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_the_same_bytes(
    collecting: list[int], layout: Layout, dtype: torch.dtype
) -> None:
    case = Case(layout, 3, 8, dtype=dtype)
    check_both_directions(case, "rbln:0", [4, 1, 2, 7, 0], 2, 3, skip_blocks=1)
    # One copy a direction for more than ten pieces.
    assert collecting == [1, 1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inference_mode_tensors_from_a_plain_thread(
    collecting: list[int], monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    # It measures as well, with device memory of the other mode.
    monkeypatch.setattr(copy_costs, "_measured", {})
    check_inference_mode(Case(layout, 3, 8), "rbln:0")
    assert len(collecting) == 4
    assert len(copy_costs._measured) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_than_one_buffer(
    collecting: list[int], monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    """The buffer is used again while the host reads what it held before."""
    monkeypatch.setattr(staging, "BUFFER_BYTES", 512)
    case = Case(layout, 4, 12, 2, 4, 8, torch.float16)
    check_both_directions(case, "rbln:0", [9, 1, 5, 3, 7, 11], 3, seed=4)
    assert len(collecting) == 2
    assert min(collecting) > 2


def test_each_of_eight_threads_has_device_memory_of_its_own(
    collecting: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    counting = threading.Lock()
    bind = torch.rbln.bind_device_memory

    def bound(tensor: torch.Tensor) -> Any:
        nonlocal made
        with counting:
            made += tensor.nbytes == staging.BUFFER_BYTES
        return bind(tensor)

    case = Case("kv_first", 2, 33, 4, 16, 16, torch.float16)
    layers = [
        upload(random_bits(case.layer_shape, case.dtype, i), "rbln:0") for i in range(2)
    ]
    monkeypatch.setattr(torch.rbln, "bind_device_memory", bound)
    start = threading.Barrier(8)

    def work(thread: int) -> None:
        mine = [4 * thread + offset for offset in (2, 0, 3, 1)]
        start.wait()
        with torch.rbln.stream(torch.rbln.Stream("rbln:0")):
            for turn in range(3):
                stored = random_bits(
                    case.chunk_shape(64), case.dtype, 8 * turn + thread
                )
                transfer(case, False, layers, [stored], mine, 64)
                loaded = torch.empty_like(stored)
                transfer(case, True, layers, [loaded], mine, 64)
                assert torch.equal(as_bytes(loaded), as_bytes(stored))

    with ThreadPoolExecutor(8) as executor:
        for result in [executor.submit(work, i) for i in range(8)]:
            result.result()
    assert collecting == [1] * (8 * 3 * 2)
    assert 1 <= made <= staging.MAX_LEASES


def test_without_device_memory_pieces_go_one_by_one_and_it_is_said_once(
    collecting: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    warning = MagicMock()
    monkeypatch.setattr(staging.logger, "warning", warning)
    monkeypatch.setattr(staging, "_warned", set())

    def refuse(*_: object) -> None:
        raise RuntimeError("out of device memory")

    monkeypatch.setattr(block_transfer, "make_collector", refuse)
    for seed in range(2):
        check_both_directions(Case("mla", 3, 8), "rbln:0", [4, 1, 7, 0], 2, seed=seed)
    # A copy for each of four blocks in three layers.
    assert collecting == [12] * 4
    warning.assert_called_once()
    said = warning.call_args.args[0] % warning.call_args.args[1:]
    assert "out of device memory" in said


def test_a_failure_gives_the_device_buffer_back(
    collecting: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("mla", 3, 8)
    layers = [
        upload(random_bits(case.layer_shape, case.dtype, i), "rbln:0") for i in range(3)
    ]
    chunk = torch.zeros(case.chunk_shape(8), dtype=case.dtype)

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(HostCopies, "__torch_dispatch__", fail)
        for _ in range(2 * staging.MAX_LEASES):
            with pytest.raises(RuntimeError, match="planted"):
                transfer(case, True, layers, [chunk], [3, 1], 8)
    check_both_directions(case, "rbln:0", [4, 1, 7, 0], 2)


class FailAfter(TorchDispatchMode):
    """Makes a copy fail, after real ones."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        self._left = copies

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._left -= 1
            if self._left == 0:
                raise RuntimeError("planted")
        return func(*args, **(kwargs or {}))


def small_mla() -> tuple[Case, list[torch.Tensor], torch.Tensor]:
    case = Case("mla", 3, 8)
    layers = [upload(random_bits(case.layer_shape, case.dtype, 1), "rbln:0")] * 3
    return case, layers, torch.zeros(case.chunk_shape(8), dtype=case.dtype)


@pytest.mark.parametrize("copies", [1, 3, 8])
def test_a_measurement_that_fails_is_drained(
    collecting: list[int], monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    monkeypatch.setattr(staging, "_process_arena", arena := StagingArena(2, 1))
    monkeypatch.setattr(copy_costs, "_measured", {})
    case, layers, chunk = small_mla()
    busy: list[bool] = []
    release = arena.release

    def released(lease: Lease) -> None:
        busy.append(lease.busy)
        release(lease)

    with monkeypatch.context() as patch:
        patch.setattr(arena, "release", released)
        for _ in range(4):
            with pytest.raises(RuntimeError, match="planted"), FailAfter(copies):
                transfer(case, True, layers, [chunk], [3, 1], 8)
    assert busy == [False] * 4
    check_both_directions(case, "rbln:0", [4, 1, 7, 0], 2)
    arena.close()


def test_a_measurement_that_can_t_be_drained_says_so(
    collecting: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_process_arena", arena := StagingArena(2, 1))
    monkeypatch.setattr(copy_costs, "_measured", {})
    case, layers, chunk = small_mla()

    def not_drained(*_: object) -> None:
        raise kv_transpose.NotDrained("planted")

    native = MagicMock(wraps=kv_transpose, NotDrained=kv_transpose.NotDrained)
    native.copy_times = not_drained
    with monkeypatch.context() as patch:
        patch.setattr(block_transfer, "kv_transpose", lambda: native)
        with pytest.raises(RuntimeError, match="still be in flight.*planted"):
            transfer(case, True, layers, [chunk], [3, 1], 8)
    while arena.in_use() != (0, 0):
        torch.rbln.synchronize(torch.device("rbln:0"))
    arena.close()


@pytest.mark.parametrize("tokens", [8, 6])
def test_mla_goes_straight_into_pinned_chunks(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    case = Case("mla", 3, 8, dtype=torch.float16)
    layers = [random_bits(case.layer_shape, case.dtype, i) for i in range(3)]
    device_layers = [upload(layer, "rbln:0") for layer in layers]
    chunks = [torch.zeros(case.chunk_shape(n), dtype=case.dtype, pin_memory=True)
              for n in (8, tokens)]  # fmt: skip
    # Nothing is staged.
    monkeypatch.setattr(staging, "_process_arena", StagingArena(2, 2))
    monkeypatch.setattr(staging, "make_buffer", lambda: pytest.fail("staged"))
    blocks = [4, 1, 7, 2]
    transfer(case, True, device_layers, chunks, blocks, 8)
    for index, layer in enumerate(layers):
        rows = layer[blocks].reshape(16, -1)
        assert torch.equal(as_bytes(chunks[0][index]), as_bytes(rows[:8]))
        assert torch.equal(as_bytes(chunks[1][index]), as_bytes(rows[8 : 8 + tokens]))
    restored = [upload(torch.zeros_like(layer), "rbln:0") for layer in layers]
    transfer(case, False, restored, chunks, blocks, 8)
    for got, layer in zip(restored, layers, strict=True):
        wanted = torch.zeros_like(layer)
        for number, block in enumerate(blocks):
            slots = max(0, min(4, 8 + tokens - 4 * number))
            wanted[block, :slots] = layer[block, :slots]
        assert torch.equal(as_bytes(got), as_bytes(wanted))


def test_pinned_chunks_of_inference_mode_from_a_plain_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "_process_arena", StagingArena(2, 2))
    monkeypatch.setattr(staging, "make_buffer", lambda: pytest.fail("staged"))
    check_inference_mode(Case("mla", 3, 8, dtype=torch.float16), "rbln:0", pinned=True)
