# SPDX-License-Identifier: Apache-2.0
"""Transfers that fail midway, and torch-rbln releases without streams."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest.mock import MagicMock
import itertools
import linecache
import sys

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
from lmcache.v1.platform.devices.rbln import (
    device_staging,
    kv_transfer,
    ring,
    staging,
)
from lmcache.v1.platform.devices.rbln.staging import StagingPool

pytestmark = [
    pytest.mark.npu,
    pytest.mark.deferred,
    pytest.mark.usefixtures("pipeline"),
]

CASE = Case("blocks_first", 8, 4, 4, 128, 64, torch.float16)
BUFFERS = 2


class Failure(RuntimeError):
    """The failure that a test plants."""


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[StagingPool]:
    """A small pool, so that transfers reuse buffers and losses show."""
    small = StagingPool(BUFFERS, ring._make_buffer)
    monkeypatch.setattr(ring, "_process_pool", small)
    # One layer's block a buffer: a batch per layer.
    monkeypatch.setattr(staging, "BUFFER_BYTES", 2 * 4 * 128 * 64 * 2)
    yield small
    small.close()


class FailAt(TorchDispatchMode):
    """Makes the device copy of the ``count``-th piece fail, after real ones.

    Whoever issues the copies, Python or the extension, does it through torch.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self._left = count

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._foreach_copy_.default:
            self._left -= len(args[0])
            if self._left <= 0:
                raise Failure("planted")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("to_chunks", [True, False])
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_a_failed_transfer_is_drained_and_gives_its_buffers_back(
    pool: StagingPool, to_chunks: bool, count: int
) -> None:
    layers = [random_bits(CASE.layer_shape, CASE.dtype, i) for i in range(8)]
    device_layers = [upload(layer, "rbln:0") for layer in layers]
    chunk = random_bits(CASE.chunk_shape(128), CASE.dtype, 9)
    with pytest.raises(RuntimeError, match="planted"), FailAt(count):
        transfer(CASE, to_chunks, device_layers, [chunk], [2], 128)
    assert torch.rbln.current_stream("rbln:0").query()
    with pool.borrow(BUFFERS) as loan:
        assert len({buffer.data_ptr() for buffer in loan.buffers}) == BUFFERS
    # The next transfer through the same buffers is right.
    device_layers = [upload(layer, "rbln:0") for layer in layers]
    wanted = [torch.zeros_like(chunk)]
    got = [torch.zeros_like(chunk)]
    move(CASE, True, layers, wanted, [1], 128)
    transfer(CASE, True, device_layers, got, [1], 128)
    assert_same_bytes(got, wanted)


@pytest.mark.parametrize("error", [RuntimeError("device lost"), KeyboardInterrupt()])
def test_buffers_that_were_not_drained_are_never_used_again(
    pool: StagingPool, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    layers = [upload(torch.zeros(CASE.layer_shape).half(), "rbln:0") for _ in range(8)]
    chunk = torch.zeros(CASE.chunk_shape(128)).half()
    stream = MagicMock(wraps=torch.rbln.current_stream("rbln:0"))
    stream.synchronize.side_effect = error
    with monkeypatch.context() as patch:
        patch.setattr(torch.rbln, "current_stream", lambda device: stream)
        patch.setattr(torch.rbln, "Event", MagicMock(name="Event"))
        # A failure of the clean-up does not hide the first one; an interrupt ends both.
        wanted = RuntimeError if isinstance(error, Exception) else KeyboardInterrupt
        says = "planted" if isinstance(error, Exception) else None
        with pytest.raises(wanted, match=says), FailAt(3):
            transfer(CASE, True, layers, [chunk], [0], 128)
    torch.rbln.synchronize()
    with pytest.raises(RuntimeError, match="restart the process"):
        transfer(CASE, True, layers, [chunk], [0], 128)


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th line of the staging code that runs."""

    FILES = ("rbln/ring.py", "rbln/staging.py", "rbln/kv_transfer.py", "contextlib.py")

    def __init__(self, line: int) -> None:
        self._left = line

    def __call__(self, frame: FrameType, event: str, _: object) -> InterruptAt | None:
        if not frame.f_code.co_filename.endswith(self.FILES):
            return None
        # Before it releases a lock CPython traces the line, but takes no signal.
        code = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and "lock:" not in code:
            self._left -= 1
            if self._left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def strikes(self, work: Callable[[], None]) -> bool:
        """Run ``work``; return whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


@pytest.mark.parametrize("collects", [False, True])
@pytest.mark.parametrize("to_chunks", [True, False])
def test_an_interrupt_anywhere_loses_no_capacity(
    monkeypatch: pytest.MonkeyPatch, to_chunks: bool, collects: bool
) -> None:
    case = Case("blocks_first", 2, 6, 2, 4, 8, torch.float16)
    layers = [
        upload(random_bits(case.layer_shape, case.dtype, i), "rbln:0") for i in range(2)
    ]
    chunk = random_bits(case.chunk_shape(16), case.dtype, 9)
    monkeypatch.setattr(staging, "BUFFER_BYTES", 1024)
    monkeypatch.setattr(device_staging, "_pools", {})
    monkeypatch.setattr(ring, "_process_pool", StagingPool(3, ring._make_buffer, 2))
    monkeypatch.setattr(kv_transfer, "MIN_PIECES_TO_COLLECT", 2)
    monkeypatch.setattr(kv_transfer, "_collecting_pays", lambda *_: collects)
    stream = torch.rbln.current_stream("rbln:0")

    def work() -> None:
        transfer(case, to_chunks, layers, [chunk], [4, 1, 3, 0], 16)

    work()
    struck = lost = 0
    for line in itertools.count(1):
        small = StagingPool(3, ring._make_buffer, 2)
        monkeypatch.setattr(ring, "_process_pool", small)
        if not InterruptAt(line).strikes(work):
            break
        struck += 1
        # Nothing is borrowed for ever, and what copies may still write is not lent.
        assert small.lent() == 0
        if not stream.query():
            assert small.lost() > 0
            stream.synchronize()
        for device_pool in device_staging._pools.values():
            assert device_pool.lent() == 0
        if any(pool.lost() for pool in device_staging._pools.values()):
            monkeypatch.setattr(device_staging, "_pools", {})
        lost += small.lost() > 0
    assert struck > 50
    # Almost everywhere the stream is drained, and nothing is lost.
    assert lost < struck / 4
    work()


@pytest.mark.parametrize("step", ["divide", "begin_copies"])
def test_a_transfer_that_can_t_start_gives_its_buffers_back(
    pool: StagingPool, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    layers = [upload(torch.zeros(CASE.layer_shape).half(), "rbln:0") for _ in range(8)]
    chunk = torch.zeros(CASE.chunk_shape(128)).half()

    def fail(*_: object) -> None:
        raise Failure

    with monkeypatch.context() as patch:
        patch.setattr(ring.Ring, step, fail)
        for _ in range(2 * BUFFERS):
            with pytest.raises(Failure):
                transfer(CASE, True, layers, [chunk], [0], 128)
    assert pool.lost() == pool.lent() == 0
    transfer(CASE, True, layers, [chunk], [0], 128)


@pytest.mark.parametrize("pipeline", ["python"], indirect=True)
def test_without_a_stream_the_python_pipeline_gives_its_buffers_back(
    pool: StagingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [upload(torch.zeros(CASE.layer_shape).half(), "rbln:0") for _ in range(8)]
    chunk = torch.zeros(CASE.chunk_shape(128)).half()

    def current_stream(device: object) -> None:
        raise Failure

    exception = MagicMock()
    monkeypatch.setattr(ring.logger, "exception", exception)
    with monkeypatch.context() as patch:
        patch.setattr(torch.rbln, "current_stream", current_stream)
        with pytest.raises(Failure):
            transfer(CASE, True, layers, [chunk], [0], 128)
    assert pool.loans == 1
    assert pool.lost() == pool.lent() == 0
    # Nothing was begun, so nothing had to be drained.
    exception.assert_not_called()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_streams_copies_are_synchronous_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    warning = MagicMock()
    monkeypatch.setattr(ring.logger, "warning", warning)
    monkeypatch.setattr(ring, "_process_pool", None)
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.delattr(torch.rbln, name)
    ring.supports_async_copies.cache_clear()
    try:
        for seed in range(3):
            case = Case(layout, 3, 6)
            check_both_directions(case, "rbln:0", [4, 0, 5, 1], 2, seed=seed)
    finally:
        ring.supports_async_copies.cache_clear()
    warning.assert_called_once()
    said = warning.call_args.args[0] % warning.call_args.args[1:]
    assert "Stream, Event, current_stream" in said
    assert "synchronously" in said
    assert "torch-rbln" in said
