# SPDX-License-Identifier: Apache-2.0
"""Prompts whose greedy answers no rounding can change, with these answers.

Two NPUs add up in another order than one, and both in another one than the reference,
which is transformers in float32: no NPU, no vLLM, no cache. A greedy token is compared
where the best logit leads by more than that can change.
"""

# Standard
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
import random

# Third Party
import torch

# First Party
from tests.support.serving import tiny_models

# How far the best logit leads, in standard deviations of the logits.
MARGIN = 0.15


@dataclass(frozen=True)
class ClearPrompt:
    """A prompt and its greedy answer.

    Attributes:
        tokens: The prompt.
        answer: The tokens that follow.
    """

    tokens: list[int]
    answer: tuple[int, ...]


def clear_prompts(
    model: Path, lengths: Sequence[int], count: int, new_tokens: int
) -> list[ClearPrompt]:
    """Choose prompts with clear answers.

    Args:
        model: Folder of the model.
        lengths: Of the prompts, in tokens.
        count: Number of prompts.
        new_tokens: Tokens of an answer.

    Returns:
        Random prompts whose greedy tokens lead by the margin at every step.
    """
    # Third Party
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model).float()
    chance = random.Random(0)
    found: list[ClearPrompt] = []
    for number in range(20):
        length = lengths[number % len(lengths)]
        batch = [
            [chance.randrange(3, tiny_models.VOCAB_SIZE) for _ in range(length)]
            for _ in range(8)
        ]
        answer = network.generate(
            torch.tensor(batch),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.stack(answer.logits)  # [tokens, prompts, vocabulary]
        best = logits.topk(2).values
        lead = (best[..., 0] - best[..., 1]) / logits.std(dim=-1)
        clear = (lead.amin(dim=0) > MARGIN).nonzero().flatten().tolist()
        # Not all of one length.
        found += [
            ClearPrompt(batch[i], tuple(answer.sequences[i, length:].tolist()))
            for i in (clear if len(lengths) == 1 else clear[:2])
        ]
        if len(found) >= count:
            return found[:count]
    raise AssertionError(f"{model.name}: no {count} prompts have clear answers")
