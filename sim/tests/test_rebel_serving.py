# SPDX-License-Identifier: Apache-2.0
"""vLLM with vllm-rbln's own worker on the simulated NPU, against transformers."""

# Standard
import json
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Third Party
import pytest
import torch

# First Party
from tests.support.forked_programs import ForkedPrograms, forking
from tests.support.serving import tiny_models

pytestmark = [
    pytest.mark.sim,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm_rbln") is None, reason="needs vllm-rbln"),
]

NEW_TOKENS = 6
# Around a block (256) and around a chunk of the prefill (128).
LENGTHS = (300, 256, 257, 127)
PROMPTS = [[3 + (i * 37 + length) % 500 for i in range(length)] for length in LENGTHS]

# Three tokens a sequence and step; prompts repeat, so that n-grams are found.
DRAFTS = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 2,
    }
}
# Pipeline parallelism: hidden states go from one NPU to the other.
STAGES = {"pipeline_parallel_size": 2}

_SERVE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    work = json.load(open(sys.argv[1]))
    llm = LLM(
        model=work["model"], dtype=work["dtype"], enforce_eager=work["eager"],
        model_impl="vllm", block_size=256, max_model_len=1024,
        max_num_batched_tokens=128, max_num_seqs=4, enable_prefix_caching=False,
        additional_config=work["config"], seed=0, **work["engine"],
    )
    greedy = SamplingParams(
        temperature=0, max_tokens=work["new_tokens"], ignore_eos=True
    )
    def generate(prompts):
        prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]
    result = {
        "together": generate(work["prompts"]),
        "alone": [generate([prompt])[0] for prompt in work["prompts"]],
    }
    json.dump(result, open(sys.argv[2], "w"))
"""


def reference(model: Path) -> list[list[int]]:
    """Greedy tokens of transformers in float32 on contiguous caches."""
    # Third Party
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model).float()
    outputs = []
    for prompt in PROMPTS:
        full = network.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs.append(full[0, len(prompt) :].tolist())
    return outputs


@pytest.fixture(scope="module")
def programs() -> Iterator[ForkedPrograms]:
    with forking() as made:
        yield made


@pytest.mark.parametrize(
    ("kind", "dtype", "custom_kernel", "eager", "dynamic", "engine"),
    [
        pytest.param("qwen3", "float32", "0", False, False, {}, id="blocks-first"),
        pytest.param("llama", "float32", "1", False, False, {}, id="kv-first"),
        pytest.param("mla", "float16", "0", False, False, {}, id="mla"),
        pytest.param("qwen3", "float32", "0", False, True, {}, id="dynamic-kv-cache"),
        pytest.param("qwen3", "float16", "0", True, False, {}, id="eager"),
        pytest.param("qwen3", "float32", "0", False, False, DRAFTS, id="drafts"),
        pytest.param("qwen3", "float32", "0", False, False, STAGES, id="two-stages"),
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    kind: str,
    dtype: str,
    custom_kernel: str,
    eager: bool,
    dynamic: bool,
    engine: dict[str, Any],
    tmp_path: Path,
    rbln_sim_environment: dict[str, str],
    programs: ForkedPrograms,
) -> None:
    model = tiny_models.make(kind, tmp_path)
    work = {
        "model": str(model),
        "dtype": dtype,
        "eager": eager,
        "new_tokens": NEW_TOKENS,
        "prompts": PROMPTS,
        "config": {"use_dynamic_kv_cache": dynamic},
        # Sized by the device when dynamic.
        "engine": engine | ({} if dynamic else {"num_gpu_blocks_override": 16}),
    }
    program, log = tmp_path / "offline.py", tmp_path / "log"
    program.write_text(textwrap.dedent(_SERVE))
    (tmp_path / "work.json").write_text(json.dumps(work))
    settings = {
        "RBLN_SIM_DEVICES": str(engine.get("pipeline_parallel_size", 1)),
        "RBLN_USE_CUSTOM_KERNEL": custom_kernel,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_RBLN_DISABLE_FALLBACK": "compile_error",
        "VLLM_NO_USAGE_STATS": "1",
    }
    started = programs.start(
        [str(program), "work.json", "result.json"],
        rbln_sim_environment | settings,
        tmp_path,
        log,
    )
    assert started.wait(1200) == 0, log.read_text()[-8000:]
    served = json.loads((tmp_path / "result.json").read_text())
    assert served["together"] == reference(model)
    assert served["alone"] == served["together"]
