# SPDX-License-Identifier: Apache-2.0
"""The simulated ``rebel`` as vllm-rbln and torch-rbln import it."""

# Standard
import gc
import importlib
import inspect
import io
from pathlib import Path

# Third Party
import pytest
import torch

rebel = pytest.importorskip("rebel", reason="tests the simulator itself")

pytestmark = pytest.mark.sim

MODULES = [
    "rebel",
    "rebel._C",
    "rebel._C.vmem",
    "rebel.compile_context",
    "rebel.core.mega_cache",
    "rebel.core.program_capture",
    "rebel.core.torch_compile",
    "rebel.device_info",
    "rebel.flags",
    "rebel.host_memory",
    "rebel.kv_cache",
    "rebel.ops.torch_custom_ops.attn",
    "rebel.ops.torch_custom_ops.sampling",
    "rebel.profiler",
    "rebel.rds",
    "rebel.triton",
    "rebel.triton.language",
    "rebel.triton.language.extra.rbln.libdevice",
]


@pytest.mark.parametrize("name", MODULES)
def test_an_unknown_attribute_is_named_in_the_error(name: str) -> None:
    module = importlib.import_module(name)
    with pytest.raises(AttributeError, match=f"{name}.no_such_thing is not simulated"):
        _ = module.no_such_thing
    assert not hasattr(module, "no_such_thing")


def test_a_missing_module_cannot_be_imported() -> None:
    with pytest.raises(ImportError, match="no_such_module"):
        importlib.import_module("rebel.no_such_module")
    with pytest.raises(ImportError, match="cannot import name 'context_of'"):
        from rebel import context_of  # noqa: F401


def test_the_ahead_of_time_compiler_refuses_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"rebel\.compile is not supported"):
        rebel.compile(torch.nn.Identity(), input_info=[])
    # What vllm-rbln asks before it passes compile_dtype on.
    assert "dtype" not in inspect.signature(rebel.compile).parameters


def test_npu_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RBLN_FORCE_NPU_NAME", raising=False)
    name = rebel.get_npu_name(0)
    assert name == importlib.import_module("rebel.device_info").get_npu_name()
    # vllm-rbln refuses RBLN-CA* and takes other kernels for CR13.
    assert name.startswith("RBLN-CR")
    assert name != "RBLN-CR13"
    monkeypatch.setenv("RBLN_FORCE_NPU_NAME", "RBLN-XY99")
    assert rebel.get_npu_name() == "RBLN-XY99"


def test_version_is_the_one_vllm_rbln_is_made_for() -> None:
    assert rebel.__version__ == "0.12.0"


def test_compile_context_remembers_static_addresses() -> None:
    first, second = torch.zeros(1), torch.ones(1)
    with rebel.CompileContext(use_weight_sharing=True) as context:
        context.mark_static_address(first, "kv_cache_0")
        context.mark_static_address(second, "kv_cache_0")
    assert context.static_addresses["kv_cache_0"] is second


def test_the_artefact_cache_is_empty(tmp_path: Path) -> None:
    mega_cache = importlib.import_module("rebel.core.mega_cache")
    mega_cache.set_dir(str(tmp_path))
    bundle = io.BytesIO()
    assert mega_cache.write_bundle(bundle) is False
    assert bundle.getvalue() == b""
    assert mega_cache.read_bundle(io.BytesIO(b"something")) is None
    assert list(tmp_path.iterdir()) == []


def test_huge_host_memory_is_zero_and_outlives_its_maker() -> None:
    tensor = torch.rbln.huge_host_empty(1 << 20)
    gc.collect()
    assert tensor.count_nonzero() == 0
    tensor[-1] = 7
    assert tensor.sum() == 7
    assert tensor.data_ptr() % 4096 == 0


@pytest.mark.parametrize("numel", [1, 2048, 4095])
def test_aligned_tensor(numel: int) -> None:
    aligned_tensor = importlib.import_module("rebel.kv_cache").aligned_tensor
    tensor = aligned_tensor(numel)
    assert tensor.shape == (numel,)
    assert tensor.dtype == torch.float16
    assert tensor.data_ptr() % 4096 == 0
    tensor.fill_(1.0)
    assert tensor.sum() == numel


def test_kernel_files_import_but_kernels_do_not_run() -> None:
    triton = importlib.import_module("rebel.triton")

    assert isinstance(triton.language.constexpr, type)  # an annotation

    @triton.jit
    def kernel(x: torch.Tensor, SIZE: int) -> None:
        raise AssertionError("a kernel body ran")

    with pytest.raises(NotImplementedError, match="rbln_triton_ops.kernel"):
        kernel.warmup(torch.zeros(1), 4, grid=(1,), host_layout="1:2:3")


def test_profiler_sections_may_be_opened_and_closed() -> None:
    assert rebel.profiler.start() is None
    assert rebel.profiler.done() is None
    assert isinstance(rebel.flags.RBLN_PROFILER, bool)
