# SPDX-License-Identifier: Apache-2.0
"""What vllm-rbln 0.12 gets wrong by itself: on host tensors, with nothing simulated.

An engine on the simulator fails likewise, and one on an NPU must. When a test here
fails, vllm-rbln has changed: see ``lmcache_rbln.integration.vllm.request_checks``.
"""

# Standard
from importlib.util import find_spec
from types import SimpleNamespace

# Third Party
import pytest
import torch

pytestmark = [
    pytest.mark.sim,
    pytest.mark.skipif(find_spec("vllm_rbln") is None, reason="needs vllm-rbln"),
]

TOKENS, SIZE, VOCABULARY = 8, 4, 16


def prompt_logprobs_of(hidden_states: torch.Tensor) -> torch.Tensor:
    """Run vllm-rbln's own code for a prompt of TOKENS tokens, all in this step."""
    # Third Party
    from vllm.v1.sample.sampler import Sampler
    from vllm_rbln.v1.worker.rbln_model_runner import RBLNModelRunner

    request = SimpleNamespace(
        prompt_token_ids=list(range(TOKENS)),
        in_progress_prompt_logprobs_cpu=None,
        num_computed_tokens=0,
    )
    head = torch.randn(SIZE, VOCABULARY, generator=torch.Generator().manual_seed(0))
    runner = SimpleNamespace(
        num_prompt_logprobs={"request": 1},
        requests={"request": request},
        input_batch=SimpleNamespace(req_id_to_index={"request": 0}),
        query_start_loc=torch.tensor([0, TOKENS]),
        model=SimpleNamespace(compute_logits=lambda states: states @ head),
        sampler=Sampler(),
    )
    results = RBLNModelRunner._get_prompt_logprobs_dict(
        runner, hidden_states, {"request": TOKENS}
    )
    return results["request"].logprobs


def test_prompt_logprobs_fail_on_a_host_as_they_do_on_an_npu() -> None:
    rows = torch.randn(TOKENS, SIZE, generator=torch.Generator().manual_seed(1))
    # As its model runner leaves the states of a prefill: a batch of one prompt, cut
    # to the tokens that are sampled from (``hidden_states[:, token_indices]``).
    with pytest.raises(RuntimeError, match="Index tensor must have the same number"):
        prompt_logprobs_of(rows[None, -1:])
    # Uncut, as with a drafter that needs them, there is a dimension too many as well.
    with pytest.raises(RuntimeError, match="Index tensor must have the same number"):
        prompt_logprobs_of(rows[None])
    # With the row for each token that it counts on, it wants four results of vLLM's
    # sampler, which has more.
    with pytest.raises(ValueError, match="too many values to unpack"):
        prompt_logprobs_of(rows)
