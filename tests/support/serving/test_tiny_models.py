# SPDX-License-Identifier: Apache-2.0
"""Models that transformers loads whole, the same bytes each time."""

# Standard
from pathlib import Path
from typing import Any

# Third Party
import pytest
import torch

# First Party
from tests.support.serving import tiny_models


@pytest.mark.parametrize("kind", tiny_models.NAMES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_transformers_loads_every_weight(kind: str, dtype: str, tmp_path: Path) -> None:
    # Third Party
    from transformers import AutoModelForCausalLM

    size = tiny_models.Size(layers=1, heads=4, kv_heads=1, head_dim=32, hidden=64)
    model = tiny_models.make(kind, tmp_path, size, dtype)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    network, info = loaded
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys"))
    assert not info["mismatched_keys"]
    logits = network(torch.tensor([[3, 4, 5]])).logits.float()
    assert logits.shape == (1, 3, tiny_models.VOCAB_SIZE)
    assert logits.isfinite().all()
    assert logits.std() > 0.1


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    first, again, other = (
        tiny_models.make("mla", tmp_path / name, seed=seed)
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    for path in first.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes()
    weights = "model.safetensors"
    assert (first / weights).read_bytes() != (other / weights).read_bytes()
