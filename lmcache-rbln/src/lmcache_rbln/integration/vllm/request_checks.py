# SPDX-License-Identifier: Apache-2.0
"""Requests that vllm-rbln 0.12 does not survive, refused before the engine sees them.

vLLM asks every installed logits processor whether it can serve a request's sampling
parameters, in the process that took the request, and answers HTTP 400 where one can't.
``RequestChecks`` is installed for that question alone; it changes no logits.
"""

# Standard
from typing import Any
import sys

# Third Party
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor
import torch

# vllm-rbln imports this where a run has its vllm model implementation, and only there.
_MODEL_IMPLEMENTATION = "vllm_rbln.platform.vllm_impl"


class RequestChecks(LogitsProcessor):
    """Refuses requests that would end the engine."""

    # vllm-rbln asks a processor that leaves argmax alone whether it has work to do,
    # and scales the logits twice for one that does not say no.
    min_p_count = 0

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse prompt logprobs: vllm-rbln keeps no row per prompt token for them.

        Args:
            sampling_params: Of a new request.

        Raises:
            VLLMValidationError: If it asks for log probabilities of its prompt, which
                an OpenAI request does with ``prompt_logprobs``, or with ``echo`` and
                ``logprobs``.
        """
        wanted = sampling_params.prompt_logprobs
        if wanted is None or _MODEL_IMPLEMENTATION not in sys.modules:
            return
        raise VLLMValidationError(
            f"prompt_logprobs={wanted} is not supported by vllm-rbln 0.12, and would "
            "end its engine; leave prompt_logprobs out, or echo where logprobs is set",
            parameter="prompt_logprobs",
            value=wanted,
        )

    def __init__(self, vllm_config: Any, device: torch.device, pinned: bool) -> None:
        """There is nothing to keep."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits as they are."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """Return True, so that greedy sampling does not call it."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """There is nothing to keep."""
