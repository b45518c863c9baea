# SPDX-License-Identifier: Apache-2.0
"""Requests that would end the engine, and that vLLM asks about them."""

# Standard
from types import ModuleType
import sys

# Third Party
import pytest

pytest.importorskip("vllm_rbln")

# Third Party
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import validate_logits_processors_parameters
import torch

# First Party
from lmcache_rbln.integration.vllm import request_checks

pytestmark = pytest.mark.npu


@pytest.fixture
def vllm_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    name = request_checks._MODEL_IMPLEMENTATION
    monkeypatch.setitem(sys.modules, name, ModuleType(name))


@pytest.mark.usefixtures("vllm_implementation")
@pytest.mark.parametrize("wanted", [0, 1, 20, -1])
def test_vllm_refuses_prompt_logprobs(wanted: int) -> None:
    with pytest.raises(VLLMValidationError) as refused:
        validate_logits_processors_parameters(
            None, SamplingParams(prompt_logprobs=wanted)
        )
    assert f"prompt_logprobs={wanted} is not supported by vllm-rbln" in str(
        refused.value
    )
    assert "leave prompt_logprobs out" in str(refused.value)


@pytest.mark.usefixtures("vllm_implementation")
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(logprobs=5, n=3, seed=1)]
)
def test_all_else_is_served(params: SamplingParams) -> None:
    validate_logits_processors_parameters(None, params)


def test_another_model_implementation_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(
        sys.modules, request_checks._MODEL_IMPLEMENTATION, raising=False
    )
    validate_logits_processors_parameters(None, SamplingParams(prompt_logprobs=1))


def test_it_changes_no_logits() -> None:
    checks = request_checks.RequestChecks(None, torch.device("cpu"), False)
    logits = torch.randn(2, 4)
    before = logits.clone()
    checks.update_state(None)
    assert checks.apply(logits) is logits
    assert torch.equal(logits, before)
    assert checks.is_argmax_invariant()
    # Else vllm-rbln takes a slower way for every random sample.
    assert checks.min_p_count == 0
