# SPDX-License-Identifier: Apache-2.0
"""Which format LMCache detects for vLLM-RBLN's KV caches."""

# Standard
from concurrent.futures import ThreadPoolExecutor
from importlib import util
from typing import Any
import gc
import subprocess
import sys

# Third Party
from kv_reference import LAYOUTS, Case, Layout
import pytest
import torch

# First Party
from lmcache.lmcache_native import EngineKVFormat
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.kv_format import detect_format
from lmcache.v1.gpu_connector.kv_format.detectors import get_detector, vllm_rbln
from lmcache.v1.gpu_connector.kv_format.detectors.vllm import VLLM_Detector
from lmcache.v1.gpu_connector.utils import (
    get_block_size,
    get_head_size,
    get_num_blocks,
    get_num_heads,
)
from lmcache.v1.platform.devices.rbln.lmcache_release import (
    BLOCKS_FIRST,
    HAS_BLOCKS_FIRST,
)
from lmcache.v1.platform.devices.rbln.settings import (
    STAGING_ENV_VAR,
    THREADS_ENV_VAR,
    transpose_threads,
)

_AMBIGUOUS = (2, 2, 3, 1, 4, 8)


def caches(shape: tuple[int, ...]) -> Any:
    return [torch.zeros(shape) for _ in range(2)]


@pytest.fixture(autouse=True)
def no_current_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on a vLLM model that another one left behind."""
    monkeypatch.setattr(vllm_rbln, "_ask_vllm_rbln", lambda: None)
    monkeypatch.delenv(vllm_rbln.LAYOUT_ENV_VAR, raising=False)


def answer(monkeypatch: pytest.MonkeyPatch, axis: int | None) -> None:
    monkeypatch.setattr(vllm_rbln, "_ask_vllm_rbln", lambda: axis)


def test_it_stands_before_vllm_s_own_detector() -> None:
    detector = get_detector(EngineType.VLLM)
    assert isinstance(detector, vllm_rbln.VLLM_RBLN_Detector)
    assert isinstance(detector, VLLM_Detector)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (3, 2, 2, 2), (7, 1, 2, 1), (5, 4, 16, 8)]
)
@pytest.mark.parametrize("hint", [{}, {"kv_layout": "NHD"}, {"kv_layout": "HND"}])
def test_every_layout_is_told_by_its_shape(
    layout: Layout, sizes: tuple[int, int, int, int], hint: Any
) -> None:
    case = Case(layout, 2, *sizes)
    layers = caches(case.layer_shape)
    views: Any
    engine_kv_format, views = detect_format(layers, EngineType.VLLM, hint)
    assert engine_kv_format == case.engine_kv_format
    assert [v.data_ptr() for v in views] == [t.data_ptr() for t in layers]
    # With a format of its own for each layout, LMCache gets the caches as they are.
    same = layout != "blocks_first" or HAS_BLOCKS_FIRST
    assert ([v.shape for v in views] == [t.shape for t in layers]) is same
    assert get_num_blocks(views, engine_kv_format) == case.num_blocks
    assert get_block_size(views, engine_kv_format) == case.block_size
    assert get_head_size(views, engine_kv_format) == case.head_size
    if layout != "mla":
        assert get_num_heads(views, engine_kv_format) == case.num_heads


def test_other_engines_layouts_are_left_to_vllm_s_detector() -> None:
    for shape in [(2, 5, 4, 3, 8), (5, 2, 4, 3, 8), (5, 4, 8), (5, 4, 3, 8)]:
        layers = caches(shape)
        assert (
            detect_format(layers, EngineType.VLLM)[0]
            == VLLM_Detector().discover(layers, {})[0]
        )


@pytest.mark.parametrize(
    "shape", [(5, 3, 2, 1, 4, 8), (2, 5, 2, 3, 4, 8), (5, 2, 2, 2, 4, 8)], ids=str
)
def test_other_6d_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="neither blocks-first"):
        detect_format(caches(shape), EngineType.VLLM)


def test_meta_caches_are_refused() -> None:
    layers: Any = [torch.zeros((5, 2, 3, 1, 4, 8), device="meta")]
    with pytest.raises(ValueError, match="VLLM_RBLN_USE_DEVICE_TENSOR=1"):
        vllm_rbln.VLLM_RBLN_Detector().discover(layers, {})


def test_two_blocks_are_never_guessed() -> None:
    with pytest.raises(ValueError, match="LMCACHE_RBLN_KV_LAYOUT=blocks_first"):
        detect_format(caches(_AMBIGUOUS), EngineType.VLLM)


@pytest.mark.parametrize(
    ("axis", "name", "wanted"),
    [
        (0, "blocks_first", BLOCKS_FIRST),
        (1, "kv_first", EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS),
    ],
)
def test_two_blocks_are_as_vllm_rbln_or_the_setting_says(
    monkeypatch: pytest.MonkeyPatch, axis: int, name: str, wanted: EngineKVFormat
) -> None:
    answer(monkeypatch, axis)
    assert detect_format(caches(_AMBIGUOUS), EngineType.VLLM)[0] == wanted
    answer(monkeypatch, None)
    monkeypatch.setenv(vllm_rbln.LAYOUT_ENV_VAR, f" {name.upper()} ")
    assert detect_format(caches(_AMBIGUOUS), EngineType.VLLM)[0] == wanted


def test_an_unknown_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm_rbln.LAYOUT_ENV_VAR, "nhd")
    with pytest.raises(ValueError, match="blocks_first or kv_first"):
        detect_format(caches(_AMBIGUOUS), EngineType.VLLM)


def test_the_answer_at_registration_holds_in_other_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = caches(_AMBIGUOUS)
    answer(monkeypatch, 1)
    wanted = detect_format(layers, EngineType.VLLM)[0]
    # Store threads have no current model, and a setting must not override it.
    answer(monkeypatch, None)
    monkeypatch.setenv(vllm_rbln.LAYOUT_ENV_VAR, "blocks_first")
    with ThreadPoolExecutor(1) as executor:
        later = executor.submit(detect_format, layers, EngineType.VLLM).result()
    assert later[0] == wanted == EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS


def test_another_model_does_not_change_caches_that_are_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = caches(_AMBIGUOUS)
    answer(monkeypatch, 1)
    detect_format(layers, EngineType.VLLM)
    answer(monkeypatch, 0)
    others = caches(_AMBIGUOUS)
    for found, wanted in (
        (others, BLOCKS_FIRST),
        (layers, EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS),
    ):
        assert detect_format(found, EngineType.VLLM)[0] == wanted


def test_every_layer_is_looked_at() -> None:
    good = torch.zeros(5, 2, 3, 1, 4, 8)
    for bad in (torch.zeros(5, 3, 2, 1, 4, 8), torch.zeros(5, 4, 8)):
        with pytest.raises(ValueError, match="neither blocks-first"):
            detect_format([good, bad], EngineType.VLLM)


def test_new_caches_at_an_old_address_are_not_taken_for_the_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer(monkeypatch, 1)
    for _ in range(50):
        detect_format(caches(_AMBIGUOUS), EngineType.VLLM)
    gc.collect()
    answer(monkeypatch, None)
    for _ in range(50):
        with pytest.raises(ValueError, match="two blocks"):
            detect_format(caches(_AMBIGUOUS), EngineType.VLLM)
    answer(monkeypatch, 0)
    detect_format(caches(_AMBIGUOUS), EngineType.VLLM)
    assert len(vllm_rbln._known_axes) <= 2


@pytest.mark.npu
@pytest.mark.parametrize("name", [STAGING_ENV_VAR, THREADS_ENV_VAR])
@pytest.mark.parametrize("shape", [(3, 2, 3, 1, 4, 8), (3, 4, 8)], ids=str)
def test_a_bad_setting_of_transfers_stops_the_registration(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], name: str
) -> None:
    layers = caches(shape)
    on_device = [layer.to("rbln:0") for layer in layers]
    detect_format(on_device, EngineType.VLLM)
    monkeypatch.setenv(name, "many")
    transpose_threads.cache_clear()
    with pytest.raises(ValueError, match=f"{name}='many' is not a whole number"):
        detect_format(on_device, EngineType.VLLM)
    # Other devices have no use for it.
    detect_format(layers, EngineType.VLLM)


@pytest.mark.npu
@pytest.mark.parametrize("shape", [(3, 2, 3, 1, 4, 8), (2, 3, 3, 1, 4, 8), (3, 4, 8)])
def test_a_bad_layout_stops_the_registration_whatever_the_number_of_blocks(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    on_device = [layer.to("rbln:0") for layer in caches(shape)]
    monkeypatch.setenv(vllm_rbln.LAYOUT_ENV_VAR, "kvfirst")
    with pytest.raises(ValueError, match="='kvfirst' is unknown.*blocks_first or kv_f"):
        detect_format(on_device, EngineType.VLLM)


_ASK = """
from types import SimpleNamespace
from vllm.config import set_current_vllm_config
from vllm_rbln.config import RBLNConfig
from lmcache.v1.gpu_connector.kv_format.detectors.vllm_rbln import _ask_vllm_rbln

answers = [_ask_vllm_rbln()]
for custom in (False, True):
    ops = {"custom_ops": [], "enabled_custom_ops": {}, "disabled_custom_ops": {}}
    model = SimpleNamespace(
        compilation_config=SimpleNamespace(**ops),
        additional_config=RBLNConfig(use_custom_kernel=custom),
        model_config=None,
    )
    with set_current_vllm_config(model, check_compile=False):
        answers.append(_ask_vllm_rbln())
answers.append(_ask_vllm_rbln())
print("ANSWERS", answers)
"""


@pytest.mark.npu
@pytest.mark.slow
def test_vllm_rbln_answers_only_while_it_builds_a_model() -> None:
    if util.find_spec("vllm_rbln") is None:
        pytest.skip("vllm-rbln is not installed")
    run = subprocess.run(
        [sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=600
    )
    assert "ANSWERS [None, 0, 1, None]" in run.stdout, run.stdout + run.stderr
