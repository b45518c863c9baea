# SPDX-License-Identifier: Apache-2.0
"""Right bytes pass, wrong ones never get a time."""

# Future
from __future__ import annotations

# Standard
from pathlib import Path
from typing import Any
import json

# Third Party
import pytest
import torch

# First Party
from benchmarks import _cases, _measure, _session, _stock, block_transfer
from benchmarks._cases import BLOCKS_FIRST, GATHER, KV_FIRST, MLA, SCATTER, Case, Model
from lmcache.lmcache_native import TransferDirection

pytestmark = pytest.mark.npu


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, latent = Model("tiny", 2, 4, 32), Model("latent", 2, 1, 64, mla=True)
    monkeypatch.setitem(_cases.MODELS, "tiny", tiny)
    monkeypatch.setitem(_cases.MODELS, "latent", latent)
    monkeypatch.setattr(_measure, "_LEAST_S", 0.0)


@pytest.fixture(scope="module")
def operations() -> dict[str, Any]:
    return _session.load_contenders()


@pytest.mark.parametrize(
    "case",
    [
        Case("tiny", 8, 4, 2, dtype="fp8", adjacent=True),
        Case("latent", 8, 4, 2),
        Case("tiny", 8, 2, 1, threads=3),
    ],
    ids=str,
)
def test_every_contender_is_verified_and_timed(
    case: Case, operations: dict[str, Any]
) -> None:
    rows = _measure.measure(case, operations, rounds=2)
    wanted = [
        (way, layout) for way in (GATHER, SCATTER) for layout in case.geometry.layouts
    ]
    assert [(row.direction, row.layout) for row in rows] == wanted
    names = {"floor", "stock", "ours"} | ({"generic"} if case.geometry.mla else set())
    for row in rows:
        assert set(row.seconds) == names
        assert min(row.seconds.values()) > 0


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


class Lazy:
    """Operations that move nothing."""

    def multi_layer_block_kv_transfer(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("direction", [GATHER, SCATTER])
@pytest.mark.parametrize("layout", [BLOCKS_FIRST, KV_FIRST, MLA])
def test_wrong_bytes_end_the_run(
    direction: str, layout: str, lazy: bool, operations: dict[str, Any]
) -> None:
    case = Case("latent" if layout == MLA else "tiny", 8, 2, 1)
    ours = Lazy() if lazy else Wrong(operations["ours"])
    session = _session.Session(case, {**operations, "ours": ours})
    session.verify("stock", case.geometry.layouts[-1], GATHER)
    with pytest.raises(_session.WrongBytesError, match=f"ours left .* {layout}"):
        session.verify("ours", layout, direction)
    session.close()


def test_stock_is_the_pinned_one_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert type(_stock.load_ops()).__module__ == "lmcache_stock_rbln.device_ops"
    (tmp_path / "upstream.toml").write_text((_stock.ROOT / "upstream.toml").read_text())
    monkeypatch.setattr(_stock, "ROOT", tmp_path)
    with pytest.raises(RuntimeError, match="got no such file; .* `make setup`"):
        _stock.sdist()


@pytest.mark.sim
def test_main_counts_copies_and_judges(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("Qwen3-1.7B", 128, 1, 1)
    monkeypatch.setattr(block_transfer, "selection", lambda: [case])
    options = ["--rounds", "2", "--check", "--folder", str(tmp_path)]
    status = block_transfer.run(
        block_transfer.parse_arguments(options), "simulator", simulated=True
    )
    printed = capsys.readouterr().out
    assert status == int("MISSED" in printed)
    written = json.loads((tmp_path / "block_transfer.json").read_text())
    first = written["rows"][0]
    # Stock copies K and V of each of 28 layers by themselves.
    assert first["copies"]["stock"]["host_descriptors"] == 56
    assert first["hardware"]["modelled_s"] > case.bytes / 58e9
    assert (tmp_path / "block_transfer.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--rounds", "--torch-threads"):
        with pytest.raises(SystemExit):
            block_transfer.parse_arguments([option, "0"])
    assert "must be positive" in capsys.readouterr().err
    for nothing in (
        ["--only", "no such"],
        ["--matrix", "--no-chart", "--only", "LLaMA-65B 16x1024", "--max-gib", "1"],
    ):
        options = block_transfer.parse_arguments(nothing)
        assert block_transfer.run(options, "simulator", simulated=True) == 2
        assert "GiB has" in capsys.readouterr().err
