# SPDX-License-Identifier: Apache-2.0
"""Tiny random-weight models in Hugging Face's format, made on the spot.

vLLM and transformers load them: nothing is downloaded, neither torch nor transformers
is imported, and the same arguments give the same bytes. Text is made of the words
``w0 w1 ...``, one token each.
"""

# Standard
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

# Third Party
import numpy as np

NAMES = ("qwen3", "llama", "mla", "gemma3")
VOCAB_SIZE = 512

_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
_SAFETENSORS_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
# vllm-rbln has kernels for these sizes only; its MLA takes a 512 + 64 latent row.
_HEAD_DIMS = (32, 64, 80, 96, 128, 160, 192, 224, 256)
_LATENT_RANK = 512
_LATENT_ROPE = 64


@dataclass(frozen=True)
class Size:
    """Dimensions of a model.

    Attributes:
        layers: Decoder layers.
        heads: Query heads.
        kv_heads: KV heads, a divisor of ``heads`` (MLA has none of its own).
        head_dim: Size of a head; for MLA of its part without position and of values.
        hidden: Size of the residual stream.
        intermediate: Size of the MLP.
        max_positions: Longest sequence.
        window: What a layer of ``gemma3`` sees, in tokens; its last one sees all.
    """

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    hidden: int = 128
    intermediate: int = 256
    max_positions: int = 4096
    window: int = 128

    def __post_init__(self) -> None:
        """Refuse sizes that no runtime would take.

        Raises:
            ValueError: A size is not positive or does not fit the others.
        """
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(
                    f"{field.name} must be positive, got {getattr(self, field.name)}"
                )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads must divide heads ({self.heads}), got {self.kv_heads}"
            )
        if self.head_dim not in _HEAD_DIMS:
            raise ValueError(f"head_dim must be in {_HEAD_DIMS}, got {self.head_dim}")


def _config(kind: str, size: Size, dtype: str) -> dict[str, Any]:
    common = {
        "attention_bias": False,
        "bos_token_id": 1,
        "dtype": dtype,
        "eos_token_id": 2,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "max_position_embeddings": size.max_positions,
        "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": VOCAB_SIZE,
    }
    if kind == "qwen3":
        return {
            **common,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "layer_types": ["full_attention"] * size.layers,
        }
    if kind == "llama":
        return {
            **common,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "mlp_bias": False,
        }
    if kind == "gemma3":
        layers = ["sliding_attention"] * (size.layers - 1) + ["full_attention"]
        return {
            **common,
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": layers,
            "query_pre_attn_scalar": size.head_dim,
            "rope_parameters": dict.fromkeys(layers, common["rope_parameters"]),
            "sliding_window": size.window,
        }
    return {
        **common,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": size.heads,
        "kv_lora_rank": _LATENT_RANK,
        "q_lora_rank": None,
        "qk_nope_head_dim": size.head_dim,
        "qk_rope_head_dim": _LATENT_ROPE,
        "head_dim": _LATENT_ROPE,
        "v_head_dim": size.head_dim,
        # The configuration must name experts; no layer is reached that has some.
        "first_k_dense_replace": size.layers,
        "moe_intermediate_size": 64,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "topk_group": 1,
        "topk_method": "greedy",
    }


def _attention_shapes(kind: str, size: Size) -> dict[str, tuple[int, ...]]:
    values = size.heads * size.head_dim
    if kind == "mla":
        query = size.heads * (size.head_dim + _LATENT_ROPE)
        return {
            "q_proj": (query, size.hidden),
            "kv_a_proj_with_mqa": (_LATENT_RANK + _LATENT_ROPE, size.hidden),
            "kv_a_layernorm": (_LATENT_RANK,),
            "kv_b_proj": (2 * values, _LATENT_RANK),
            "o_proj": (size.hidden, values),
        }
    keys = size.kv_heads * size.head_dim
    norms = () if kind == "llama" else ("q_norm", "k_norm")
    return {
        "q_proj": (values, size.hidden),
        "k_proj": (keys, size.hidden),
        "v_proj": (keys, size.hidden),
        "o_proj": (size.hidden, values),
        **dict.fromkeys(norms, (size.head_dim,)),
    }


def _shapes(kind: str, size: Size) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCAB_SIZE, size.hidden)
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (size.hidden,)
        for name, shape in _attention_shapes(kind, size).items():
            yield f"{prefix}.self_attn.{name}.weight", shape
        yield f"{prefix}.post_attention_layernorm.weight", (size.hidden,)
        if kind == "gemma3":
            for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
                yield f"{prefix}.{name}.weight", (size.hidden,)
        for name in ("gate_proj", "up_proj"):
            yield f"{prefix}.mlp.{name}.weight", (size.intermediate, size.hidden)
        yield f"{prefix}.mlp.down_proj.weight", (size.hidden, size.intermediate)
    yield "model.norm.weight", (size.hidden,)
    yield "lm_head.weight", (VOCAB_SIZE, size.hidden)


def _values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    if len(shape) == 1:
        return np.ones(shape, dtype=np.float32)
    # By name, so that a weight does not depend on which others there are. Large
    # enough that logits differ well and far tokens matter.
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    spread = 1.7 / np.sqrt(shape[1]) if "embed" not in name else 1.0
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(spread)


def _encode(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "bfloat16":
        # The upper half of a float32, rounded to nearest, ties to even.
        bits = values.view(np.uint32)
        bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return (bits >> np.uint32(16)).astype("<u2").tobytes()
    return values.astype("<f2" if dtype == "float16" else "<f4").tobytes()


def _tokenizer() -> dict[str, Any]:
    words = (f"w{index}" for index in range(VOCAB_SIZE - len(_SPECIAL_TOKENS)))
    vocabulary = {token: i for i, token in enumerate((*_SPECIAL_TOKENS, *words))}
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, token in enumerate(_SPECIAL_TOKENS)
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }


def _write_safetensors(
    path: Path, dtype: str, kind: str, size: Size, seed: int
) -> None:
    """Eight bytes of header length, the header in JSON, then all tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs = []
    position = 0
    for name, shape in _shapes(kind, size):
        blob = _encode(_values(name, shape, seed), dtype)
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[dtype],
            "shape": shape,
            "data_offsets": [position, position + len(blob)],
        }
        blobs.append(blob)
        position += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(blobs)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def make(
    kind: str,
    folder: Path | str,
    size: Size | None = None,
    dtype: str = "float16",
    seed: int = 0,
) -> Path:
    """Write a model, replacing one of the same kind.

    Args:
        kind: ``qwen3``, ``llama`` (grouped-query attention, the first with norms),
            ``mla`` (DeepSeek-V2) or ``gemma3`` (sliding windows).
        folder: Where the model's own folder, named after ``kind``, is made.
        size: Dimensions; the defaults of :class:`Size` if None.
        dtype: ``float16``, ``bfloat16`` or ``float32``.
        seed: Of the weights, at least 0.

    Returns:
        The model's folder.

    Raises:
        ValueError: ``kind`` or ``dtype`` is not one of those.
    """
    if kind not in NAMES:
        raise ValueError(f"kind must be one of {NAMES}, got {kind!r}")
    if dtype not in _SAFETENSORS_DTYPES:
        raise ValueError(
            f"dtype must be one of {tuple(_SAFETENSORS_DTYPES)}, got {dtype!r}"
        )
    size = size or Size()
    model = Path(folder) / kind
    model.mkdir(parents=True, exist_ok=True)
    _write_safetensors(model / "model.safetensors", dtype, kind, size, seed)
    _write_json(model / "config.json", _config(kind, size, dtype))
    _write_json(
        model / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2}
    )
    _write_json(model / "tokenizer.json", _tokenizer())
    _write_json(
        model / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "<unk>",
            "bos_token": "<s>",
            "eos_token": "</s>",
        },
    )
    return model
