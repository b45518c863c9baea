# SPDX-License-Identifier: Apache-2.0

# Standard
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

# Third Party
import pytest
import torch

# First Party
from tests.support.serving import tiny_models

REPO = Path(__file__).resolve().parents[3]


def digest(model: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(model.iterdir())
    }


@pytest.mark.parametrize("kind", tiny_models.NAMES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_transformers_loads_every_weight(kind: str, dtype: str, tmp_path: Path) -> None:
    # Third Party
    from transformers import AutoModelForCausalLM

    size = tiny_models.Size(layers=1, heads=4, kv_heads=1, head_dim=32, hidden=64)
    model = tiny_models.make(kind, tmp_path, size, dtype)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    network, info = loaded
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys"))
    assert not info["mismatched_keys"]
    weights = {w.dtype for w in network.state_dict().values() if w.is_floating_point()}
    assert getattr(torch, dtype) in weights
    logits = network(torch.tensor([[3, 4, 5]])).logits.float()
    assert logits.shape == (1, 3, tiny_models.VOCAB_SIZE)
    assert logits.isfinite().all()
    assert logits.std() > 0.1


def test_bfloat16_is_rounded_as_torch_rounds(tmp_path: Path) -> None:
    # Third Party
    from safetensors.torch import load_file

    exact = load_file(
        tiny_models.make("llama", tmp_path / "a", dtype="float32") / "model.safetensors"
    )
    rounded = load_file(
        tiny_models.make("llama", tmp_path / "b", dtype="bfloat16")
        / "model.safetensors"
    )
    assert exact.keys() == rounded.keys()
    for name, weight in exact.items():
        assert torch.equal(weight.bfloat16(), rounded[name]), name


def test_the_tokenizer_has_one_token_a_word(tmp_path: Path) -> None:
    # Third Party
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_models.make("qwen3", tmp_path))
    assert tokenizer("w0 w7 nonsense w508").input_ids == [3, 10, 0, 511]
    assert tokenizer.decode([3, 10, 511]) == "w0 w7 w508"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert len(tokenizer) == tiny_models.VOCAB_SIZE


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    first = digest(tiny_models.make("mla", tmp_path / "a", seed=3))
    assert digest(tiny_models.make("mla", tmp_path / "b", seed=3)) == first
    other = digest(tiny_models.make("mla", tmp_path / "b", seed=4))
    assert other["model.safetensors"] != first["model.safetensors"]
    assert other["config.json"] == first["config.json"]


def test_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.serving.tiny_models"]
    options = ["--layers", "3", "--dtype", "bfloat16", "--max-positions", "8192"]
    result = subprocess.run(
        [*command, "llama", str(tmp_path), *options],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == str(tmp_path / "llama")
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    assert config["num_hidden_layers"] == 3
    assert config["max_position_embeddings"] == 8192
    assert config["dtype"] == "bfloat16"
    bad = subprocess.run(
        [*command, "llama", str(tmp_path), "--kv-heads", "3"],
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    assert bad.returncode == 2
    assert "kv_heads must divide heads (4), got 3" in bad.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "gpt"}, "kind must be one of"),
        ({"kind": "mla", "dtype": "int8"}, "dtype must be one of"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_models.make(folder=tmp_path, **arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"layers": 0}, "layers must be positive, got 0"),
        ({"head_dim": 48}, "head_dim must be in"),
        ({"heads": 6, "kv_heads": 4}, r"kv_heads must divide heads \(6\), got 4"),
    ],
)
def test_bad_sizes_are_refused(size: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_models.Size(**size)
