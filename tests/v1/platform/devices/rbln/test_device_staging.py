# SPDX-License-Identifier: Apache-2.0
"""Pieces collected in device memory: the same bytes, fewer copies to the host."""

# Future
from __future__ import annotations

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
from lmcache.v1.platform.devices.rbln import (
    device_staging,
    kv_transfer,
    ring,
    staging,
)
from lmcache.v1.platform.devices.rbln.copy_costs import HARDWARE_COSTS, CopyCosts
from lmcache.v1.platform.devices.rbln.staging import StagingPool

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
    monkeypatch.setattr(kv_transfer, "MIN_PIECES_TO_COLLECT", 2)
    monkeypatch.setattr(kv_transfer, "known_costs", lambda *_: None)
    monkeypatch.setattr(kv_transfer, "measured_costs", lambda *_: HARDWARE_COSTS)
    monkeypatch.setattr(device_staging, "_pools", {})
    host_copies: list[int] = []
    real = kv_transfer._transfer

    def counted(*arguments: Any, **named: Any) -> None:
        with HostCopies() as copies:
            real(*arguments, **named)
        host_copies.append(copies.count)

    monkeypatch.setattr(kv_transfer, "_transfer", counted)
    yield host_copies
    for pool in device_staging._pools.values():
        pool.close()


def measure_and_collect(region: Any, pinned: Any, buffer: Any, alone: Any) -> CopyCosts:
    """Measure what copies cost, and find that collecting pays, whatever it was."""
    source = region[:4]
    host = pinned[: source.nbytes].view(source.dtype)
    device_staging._Measurement().take(host, buffer[:4], source)
    return HARDWARE_COSTS


@pytest.mark.usefixtures("pipeline")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_the_same_bytes(
    collecting: list[int], layout: Layout, dtype: torch.dtype
) -> None:
    case = Case(layout, 3, 8, dtype=dtype)
    check_both_directions(case, "rbln:0", [4, 1, 2, 7, 0], 2, 3, skip_blocks=1)
    # One copy a direction for more than ten pieces.
    assert collecting == [1, 1]


@pytest.mark.usefixtures("pipeline")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inference_mode_tensors_from_a_plain_thread(
    collecting: list[int], monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    # It measures as well, with device memory of the other mode.
    monkeypatch.setattr(kv_transfer, "measured_costs", measure_and_collect)
    check_inference_mode(Case(layout, 3, 8), "rbln:0")
    assert len(collecting) == 4


@pytest.mark.usefixtures("pipeline")
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


def test_eight_threads_share_a_few_device_buffers(
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
    # More transfers at a time than device buffers.
    monkeypatch.setattr(ring, "_process_pool", StagingPool(8, ring._make_buffer))
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
    assert 1 <= made <= device_staging.DEVICE_BUFFERS


def test_without_device_memory_pieces_go_one_by_one_and_it_is_said_once(
    collecting: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    warning = MagicMock()
    monkeypatch.setattr(ring.logger, "warning", warning)

    def refuse(tensor: torch.Tensor) -> None:
        raise RuntimeError("out of device memory")

    ring._warn_without_device_buffers.cache_clear()
    real = device_staging.device_pool

    def pool_of(device: torch.device, dtype: torch.dtype) -> StagingPool:
        pool = real(device, dtype)

        def make_buffer() -> torch.Tensor:
            raise RuntimeError("out of device memory")

        pool._make_buffer = make_buffer
        return pool

    monkeypatch.setattr(kv_transfer, "device_pool", pool_of)
    for seed in range(2):
        check_both_directions(Case("mla", 3, 8), "rbln:0", [4, 1, 7, 0], 2, seed=seed)
    # A copy for each of four blocks in three layers.
    assert collecting == [12] * 4
    warning.assert_called_once()
    said = warning.call_args.args[0] % warning.call_args.args[1:]
    assert "out of device memory" in said


@pytest.mark.usefixtures("pipeline")
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
        for _ in range(2 * device_staging.DEVICE_BUFFERS):
            with pytest.raises(RuntimeError, match="planted"):
                transfer(case, True, layers, [chunk], [3, 1], 8)
    check_both_directions(case, "rbln:0", [4, 1, 7, 0], 2)


def test_costs_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_measured", "_measurements", "_pools"):
        monkeypatch.setattr(device_staging, name, {})
    measurements = 0
    take = device_staging._Measurement.take

    def counted(*arguments: Any) -> None:
        nonlocal measurements
        measurements += 1
        take(*arguments)

    monkeypatch.setattr(device_staging._Measurement, "take", counted)
    # Alone, whatever other tests had borrowed.
    monkeypatch.setattr(ring.Ring, "is_alone", lambda _: True)
    for _ in range(2):
        check_both_directions(Case("kv_first", 8, 8), "rbln:0", [4, 1, 7, 0], 2)
    assert measurements == 1
    costs = device_staging.known_costs(torch.device("rbln:0"))
    assert costs is not None
    assert costs.host_descriptor_us >= 0
    # The figures of the links are not measured.
    assert (costs.host_gbps, costs.device_gbps) == (58.0, 240.0)


class Probes:
    """Stands in for the timed copies: 20 us to the host, 3 us inside, at best."""

    def __init__(self, slower_us: list[float]) -> None:
        self.began = threading.Event()
        self.go_on = threading.Event()
        self.calls = 0
        self.threads: set[int] = set()
        self._slower_us = slower_us
        self._running = threading.Lock()

    def __call__(
        self, target: torch.Tensor, source: torch.Tensor, copies: int
    ) -> float:
        assert self._running.acquire(blocking=False), "two measure at once"
        try:
            self.threads.add(threading.get_ident())
            self.began.set()
            assert self.go_on.wait(60)
            slower = self._slower_us[self.calls // 2 % len(self._slower_us)]
            self.calls += 1
            return slower + (20.0 if target.device.type == "cpu" else 3.0)
        finally:
            self._running.release()


def measure_in_threads(
    monkeypatch: pytest.MonkeyPatch, probes: Probes, others: int
) -> None:
    """Start a transfer, others while it measures, and one more when all have ended."""
    for name in ("_measured", "_measurements", "_pools"):
        monkeypatch.setattr(device_staging, name, {})
    monkeypatch.setattr(ring, "_process_pool", StagingPool(8, ring._make_buffer))
    monkeypatch.setattr(device_staging, "_fixed_us", probes)
    case = Case("kv_first", 8, 8)
    layers = [
        upload(random_bits(case.layer_shape, case.dtype, i), "rbln:0") for i in range(8)
    ]

    def work() -> torch.Tensor:
        chunk = torch.zeros(case.chunk_shape(8), dtype=case.dtype)
        with torch.rbln.stream(torch.rbln.Stream("rbln:0")):
            transfer(case, True, layers, [chunk], [4, 1], 8)
        return as_bytes(chunk)

    with ThreadPoolExecutor(1 + others) as executor:
        first = executor.submit(work)
        assert probes.began.wait(60)
        try:
            # They end although the measurement does not: nobody waits for it.
            done = [executor.submit(work) for _ in range(others)]
            got = [future.result(timeout=60) for future in done]
        finally:
            probes.go_on.set()
        got.append(first.result(timeout=60))
    got.append(work())
    assert all(torch.equal(chunk, got[0]) for chunk in got)


@pytest.mark.parametrize("others", [3, 7])
def test_one_thread_measures_and_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    probes = Probes([280.0, 0.0, 9.0])
    measure_in_threads(monkeypatch, probes, others)
    (costs,) = device_staging._measured.values()
    # The least times, however many rounds were slower.
    assert costs.host_descriptor_us == 17.0


@pytest.mark.parametrize(("slower_us", "link_us"), [([0.0], 17.0), ([40.0], 0.0)])
def test_costs_taken_beside_other_transfers_are_preliminary(
    monkeypatch: pytest.MonkeyPatch, slower_us: list[float], link_us: float
) -> None:
    for name in ("_measured", "_measurements"):
        monkeypatch.setattr(device_staging, name, {})
    region = upload(torch.zeros(4096, dtype=torch.uint8), "rbln:0")
    operands = (region, torch.zeros(4096, dtype=torch.uint8), region)
    probes = Probes(slower_us)
    probes.go_on.set()
    monkeypatch.setattr(device_staging, "_fixed_us", probes)
    costs = device_staging.measured_costs(*operands, lambda: False)
    assert costs is not None
    assert costs.host_descriptor_us == link_us
    assert device_staging._measured == {}
    # A transfer that is alone corrects them, for ever.
    alone = Probes([0.0])
    alone.go_on.set()
    monkeypatch.setattr(device_staging, "_fixed_us", alone)
    for _ in range(2):
        costs = device_staging.measured_costs(*operands, lambda: True)
        assert costs is not None
        assert costs.host_descriptor_us == 17.0
    assert alone.calls == 2 * device_staging._ROUNDS


def test_costs_beyond_reason_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ever being alone, measuring ends, with the known figure."""
    for name in ("_measured", "_measurements"):
        monkeypatch.setattr(device_staging, name, {})
    region = upload(torch.zeros(4096, dtype=torch.uint8), "rbln:0")
    operands = (region, torch.zeros(4096, dtype=torch.uint8), region)
    calls = 0

    def fixed_us(target: torch.Tensor, source: torch.Tensor, copies: int) -> float:
        nonlocal calls
        calls += 1
        return 293.0 if target.device.type == "cpu" else 1.0

    monkeypatch.setattr(device_staging, "_fixed_us", fixed_us)
    for _ in range(2 * device_staging._ATTEMPTS):
        costs = device_staging.measured_costs(*operands, lambda: False)
        assert costs is not None
        assert costs.host_descriptor_us == HARDWARE_COSTS.host_descriptor_us
    assert calls == 2 * device_staging._ROUNDS * device_staging._ATTEMPTS


@pytest.mark.parametrize("tokens", [8, 6])
def test_mla_goes_straight_into_pinned_chunks(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    case = Case("mla", 3, 8, dtype=torch.float16)
    layers = [random_bits(case.layer_shape, case.dtype, i) for i in range(3)]
    device_layers = [upload(layer, "rbln:0") for layer in layers]
    chunks = [torch.zeros(case.chunk_shape(n), dtype=case.dtype, pin_memory=True)
              for n in (8, tokens)]  # fmt: skip
    # Nothing is staged, and no staging borrowed.
    monkeypatch.setattr(ring, "_pool", lambda: pytest.fail("borrowed"))
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
    monkeypatch.setattr(ring, "_pool", lambda: pytest.fail("borrowed"))
    check_inference_mode(Case("mla", 3, 8, dtype=torch.float16), "rbln:0", pinned=True)


@pytest.mark.parametrize("to_chunks", [True, False])
@pytest.mark.parametrize("drains", [True, False])
def test_chunks_that_the_device_may_still_write_are_kept(
    monkeypatch: pytest.MonkeyPatch, to_chunks: bool, drains: bool
) -> None:
    case = Case("mla", 1, 8, dtype=torch.float16)
    layer = upload(torch.zeros(case.layer_shape).half(), "rbln:0")
    chunk = torch.zeros(case.chunk_shape(8), dtype=case.dtype, pin_memory=True)
    real = torch.rbln.current_stream("rbln:0")
    stream = MagicMock(wraps=real)
    failures = [RuntimeError("device lost")] * (1 if drains else 2)
    stream.synchronize.side_effect = [*failures, None]
    monkeypatch.setattr(ring, "_straight", {})
    with monkeypatch.context() as patch:
        patch.setattr(torch.rbln, "current_stream", lambda device: stream)
        with pytest.raises(RuntimeError) as failed:
            transfer(case, to_chunks, [layer], [chunk], [4, 1], 8)
    real.synchronize()
    assert ("may still access" in str(failed.value)) is not drains
    kept = [view.data_ptr() for views in ring._straight.values() for view in views]
    assert kept == ([] if drains else [chunk.data_ptr()])
