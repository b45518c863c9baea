# SPDX-License-Identifier: Apache-2.0
"""Contenders on a small model: right bytes pass, wrong ones never get a time."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable
from pathlib import Path
from typing import Any
import tarfile

# Third Party
import pytest
import torch

# First Party
from benchmarks import _cases, _counting, _measure, _session, _stock, block_transfer
from benchmarks._cases import BLOCKS_FIRST, GATHER, KV_FIRST, MLA, SCATTER, Case, Model
from lmcache.lmcache_native import TransferDirection

pytestmark = pytest.mark.npu

TINY = Model("tiny", 2, 4, 32)
LATENT = Model("latent", 2, 1, 64, mla=True)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for model in (TINY, LATENT):
        monkeypatch.setitem(_cases.MODELS, model.name, model)
    monkeypatch.setattr(_measure, "GENERIC_LIMIT_S", 0.2)


@pytest.fixture(scope="module")
def operations() -> dict[str, Any]:
    return _session.load_contenders()


@pytest.mark.parametrize(
    "case",
    [
        Case("tiny", 8, 1, 1),
        Case("tiny", 8, 4, 2, dtype="fp8", adjacent=True),
        Case("latent", 8, 4, 2),
        Case("tiny", 8, 2, 1, threads=3),
    ],
    ids=str,
)
def test_every_contender_is_verified_and_timed(
    case: Case, operations: dict[str, Any]
) -> None:
    rows = _measure.Measurer(operations, rounds=2).measure(case)
    wanted = [
        (way, layout) for way in (GATHER, SCATTER) for layout in case.geometry.layouts
    ]
    assert [(row.direction, row.layout) for row in rows] == wanted
    for row in rows:
        assert {"floor", "stock", "ours"} <= set(row.seconds)
        assert min(row.seconds.values()) > 0
        assert ("generic" in row.seconds) != ("generic" in row.failures)


class Clock:
    """A session whose calls take what it is told, and its CPUs' handovers.

    Far CPUs make ours take twice as long, as they do on a virtual machine.
    """

    def __init__(self, far: Callable[[int], bool]) -> None:
        self.case = Case("tiny", 8, 1, 1)
        self.calls = 0
        self._far = far

    def contenders(self) -> list[tuple[str, str]]:
        return [("floor", ""), ("stock", KV_FIRST), ("ours", KV_FIRST)]

    def verify(self, *_: Any) -> None:
        pass

    def run(self, contender: str, *_: Any) -> float:
        self.calls += 1
        slower = contender == "ours" and self._far(self.calls)
        return {"floor": 1.0, "stock": 4.0, "ours": 1.5}[contender] * (1 + slower)

    def measure(self) -> float:
        return 3.0 * self._far(self.calls)

    def limit(self) -> float:
        return 2.0


@pytest.mark.parametrize(
    ("far", "ours", "left_out"),
    [
        (lambda call: False, 1.5, False),
        # Nearly all the time, yet there are enough calls that count.
        (lambda call: call % 60 > 9, 1.5, True),
        # Too few of them: all count.
        (lambda call: call > 9, 3.0, False),
    ],
    ids=["near", "mostly far", "far"],
)
def test_calls_with_cpus_far_from_each_other_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
    far: Callable[[int], bool],
    ours: float,
    left_out: bool,
) -> None:
    monkeypatch.setattr(_measure, "_ENOUGH_S", 0.5)
    measurer = _measure.Measurer({}, rounds=20)
    clock: Any = Clock(far)
    monkeypatch.setattr(measurer, "_handovers", clock)
    rows = {row.layout: row for row in measurer._direction(clock, GATHER)}
    row = rows[KV_FIRST]
    assert row.seconds == {"floor": 1.0, "stock": 4.0, "ours": ours}
    kept, made = row.calls["ours"]
    assert row.all_count == (kept == made) == (not left_out)
    assert (row.far > 0) == (far(99_999) or far(59))
    if left_out:
        assert row.seconds_of_all == {"floor": 1.0, "stock": 4.0, "ours": 3.0}
        assert 20 <= kept < made
    else:
        assert row.seconds_of_all == row.seconds


class Wrong:
    """Operations that move everything and then spoil one byte."""

    def __init__(self, right: Any) -> None:
        self._right = right

    def multi_layer_block_kv_transfer(
        self, layers: Any, chunks: Any, ids: Any, device: Any, way: Any, *rest: Any
    ) -> None:
        arguments = (layers, chunks, ids, device, way, *rest)
        self._right.multi_layer_block_kv_transfer(*arguments)
        if way == TransferDirection.D2H:
            chunks[0].view(torch.uint8).flatten()[-1] += 1
        else:
            host = layers[-1].cpu()
            host.view(torch.uint8).flatten()[-1] += 1
            layers[-1].copy_(host)


@pytest.mark.parametrize("direction", [GATHER, SCATTER])
@pytest.mark.parametrize("layout", [BLOCKS_FIRST, KV_FIRST, MLA])
def test_wrong_bytes_are_found(
    direction: str, layout: str, operations: dict[str, Any]
) -> None:
    case = Case("latent" if layout == MLA else "tiny", 8, 2, 1)
    wrong = {**operations, "ours": Wrong(operations["ours"])}
    session = _session.Session(case, wrong)
    session.verify("stock", case.geometry.layouts[-1], GATHER, 1)
    with pytest.raises(_session.WrongBytesError, match="ours .* wrong bytes"):
        session.verify("ours", layout, direction, 1)
    session.close()


class Lazy:
    """Operations that move nothing."""

    def multi_layer_block_kv_transfer(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("direction", [GATHER, SCATTER])
def test_a_fast_contender_that_moves_nothing_fails_the_run(
    direction: str, operations: dict[str, Any]
) -> None:
    session = _session.Session(Case("tiny", 8, 2, 1), {**operations, "ours": Lazy()})
    with pytest.raises(_session.WrongBytesError):
        session.verify("ours", KV_FIRST, direction, 1)
    session.close()


def test_stock_is_the_pinned_one_under_another_name() -> None:
    stock = _stock.load_ops()
    assert type(stock).__module__ == "lmcache_stock_rbln.device_ops"
    assert _stock.load_ops().__class__ is type(stock)
    with tarfile.open(_stock.sdist()) as tar:
        assert any(name.endswith("rbln/kv_ops.py") for name in tar.getnames())


def test_an_sdist_that_is_not_there_or_not_the_pinned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = _stock.sdist().name
    (tmp_path / "upstream.toml").write_text((_stock.ROOT / "upstream.toml").read_text())
    monkeypatch.setattr(_stock, "ROOT", tmp_path)
    with pytest.raises(RuntimeError, match="make setup"):
        _stock.sdist()
    cache = tmp_path / "build/cache/sdist"
    cache.mkdir(parents=True)
    (cache / pinned).write_bytes(b"something else")
    with pytest.raises(RuntimeError, match="upstream.toml wants"):
        _stock.sdist()


@pytest.mark.sim
def test_main_counts_copies_and_judges(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_transfer, "selection", lambda: [Case("tiny", 256, 2, 2)])
    staging = {"ours, 1 threads": 1.0}
    run = _counting.run
    monkeypatch.setattr(
        _counting, "run", lambda cases, **rest: (run(cases)[0], staging)
    )
    options = block_transfer.parse_arguments(
        ["--rounds", "2", "--check", "--no-chart", "--folder", str(tmp_path)]
    )
    status = block_transfer.run(options, "simulator", simulated=True)
    printed = capsys.readouterr().out
    assert status == int("MISSED" in printed)
    assert "peak staging: ours, 1 threads: 1.0 MiB" in printed
    written = (tmp_path / "block_transfer.json").read_text()
    # Stock copies K and V of two blocks of two layers by themselves.
    assert '"host_descriptors": 8' in written
    assert not (tmp_path / "block_transfer.png").exists()
