# SPDX-License-Identifier: Apache-2.0
"""The ``rbln`` backend: graphs on the host over the simulated device's memory."""

# Standard
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

# Third Party
import pytest
import torch

# First Party
from rbln_sim.pytest_plugin import RunPython

pytest.importorskip("rebel._device", reason="tests the simulator itself")

# Third Party
from rebel._device import host_alias
from rebel.core.torch_compile import rbln_backend

pytestmark = pytest.mark.sim

DEVICES = [f"rbln:{index}" for index in range(torch.rbln.device_count())]


def on_npu(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    # A backend of another name than torch-rbln wraps: no fallback hides an error.
    def simulated(graph: Any, inputs: Any, **kwargs: Any) -> Any:
        return rbln_backend(graph, inputs, **kwargs)

    return torch.compile(
        function, backend=simulated, dynamic=False, fullgraph=True, options=options
    )


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def bound(tensor: torch.Tensor, device: str = "rbln:0") -> torch.Tensor:
    """The same values in device memory, as a KV cache is."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    torch.rbln.bind_device_memory(out)
    out.copy_(tensor)
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_result_is_the_hosts_and_lies_on_the_inputs_device(
    dtype: torch.dtype, device: str
) -> None:
    x, w = torch.randn(5, 64, dtype=dtype), torch.randn(32, 64, dtype=dtype)
    function = on_npu(lambda x, w: torch.nn.functional.linear(x, w).relu())
    out = function(x.to(device), w.to(device))
    assert out.device == torch.device(device)
    want = (x.double() @ w.double().T).to(dtype).relu()
    assert torch.equal(out.cpu(), want)


@pytest.mark.parametrize("device", DEVICES)
def test_writes_into_an_input_land_in_device_memory(device: str) -> None:
    cache = bound(torch.arange(24.0).reshape(4, 6), device)
    address = cache.data_ptr()

    def write(
        cache: torch.Tensor, row: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        cache[1] = row
        cache.index_copy_(0, index, row.unsqueeze(0) * 2)
        return cache.sum(0)

    row, index = torch.full((6,), -1.0), torch.tensor([3])
    out = on_npu(write)(cache, row.to(device), index.to(device))
    want = torch.arange(24.0).reshape(4, 6)
    want[1], want[3] = -1.0, -2.0
    assert cache.data_ptr() == address
    assert torch.equal(cache.cpu(), want)
    assert torch.equal(out.cpu(), want.sum(0))


def test_strided_and_offset_views_are_seen_as_they_are() -> None:
    base = torch.arange(60.0).reshape(5, 12)
    device = bound(base)

    def write(view: torch.Tensor) -> torch.Tensor:
        view.add_(100)
        return view.clone()

    out = on_npu(write)(device[1:4, 2:9:3].t())
    assert torch.equal(out.cpu(), base[1:4, 2:9:3].t() + 100)
    base[1:4, 2:9:3] += 100
    assert torch.equal(device.cpu(), base)


def test_an_output_that_is_a_view_of_an_input_stays_one() -> None:
    device = bound(torch.zeros(4, 3))
    same, view, fresh = on_npu(lambda x: (x, x[1:3].t(), x + 1))(device)
    device.fill_(7)
    assert torch.equal(same.cpu(), torch.full((4, 3), 7.0))
    assert torch.equal(view.cpu(), torch.full((3, 2), 7.0))
    assert torch.equal(fresh.cpu(), torch.ones(4, 3))


def test_a_copy_to_the_host_is_a_copy() -> None:
    device = bound(torch.zeros(3))

    def copy_then_write(x: torch.Tensor) -> torch.Tensor:
        before = x.cpu()
        x.add_(1)
        return before

    out = on_npu(copy_then_write)(device)
    assert out.device.type == "cpu"
    assert torch.equal(out, torch.zeros(3))
    assert torch.equal(device.cpu(), torch.ones(3))


def test_constants_and_creation_on_the_device() -> None:
    def create(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ramp = torch.arange(4, device=x.device, dtype=x.dtype)
        return ramp + torch.ones(4, device="rbln:0"), torch.zeros(2, device=x.device)

    ramp, zeros = on_npu(create)(torch.zeros(1).to("rbln:0"))
    assert [t.device for t in (ramp, zeros)] == [torch.device("rbln:0")] * 2
    assert torch.equal(ramp.cpu(), torch.arange(4.0) + 1)
    assert torch.equal(zeros.cpu(), torch.zeros(2))


def test_weights_and_buffers_are_read_anew_on_every_run() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(4, 4, bias=False)
            self.gain = torch.nn.Parameter(torch.tensor(2.0))
            self.seen: torch.Tensor
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x) * self.gain
            self.seen.add_(y.sum(0))
            return y

    model = Model()
    torch.nn.init.eye_(model.first.weight)
    model = model.to("rbln:0")
    run, x = on_npu(model), torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(run(x.to("rbln:0")).cpu(), x * 2)
        model.gain.fill_(3.0)
        model.first.weight.copy_(torch.eye(4) * 2)
        assert torch.equal(run(x.to("rbln:0")).cpu(), x * 6)
    torch.testing.assert_close(model.seen.cpu(), (x * 8).sum(0))


def test_two_devices_in_one_graph() -> None:
    if len(DEVICES) < 2:
        pytest.skip("one NPU only")

    def move(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        b.add_(a.to(b.device))
        return a * 2, b * 3

    a, b = torch.randn(4), torch.randn(4)
    on_first, on_second = bound(a, "rbln:0"), bound(b, "rbln:1")
    first, second = on_npu(move)(on_first, on_second)
    assert (first.device.index, second.device.index) == (0, 1)
    assert torch.equal(first.cpu(), a * 2)
    assert torch.equal(second.cpu(), (a + b) * 3)
    assert torch.equal(on_second.cpu(), a + b)


def test_no_device_copy_hides_in_a_run() -> None:
    cache, x = bound(torch.zeros(64, 64)), bound(torch.ones(64, 64))
    step = on_npu(lambda c, x: c.add_(x))
    step(cache, x)
    with torch.rbln.explain() as explain:
        for _ in range(3):
            step(cache, x)
    residency = explain.dump()["runtime_residency"]
    assert residency["real_host_sync_h2d"]["count"] == 0
    assert residency["real_host_sync_d2h"]["count"] == 0
    # An input that only the host has is brought up once, and counted.
    late = torch.ones(64, 64).to("rbln:0")
    with torch.rbln.explain() as explain:
        step(cache, late)
        step(cache, late)
    uploads = explain.dump()["runtime_residency"]["real_host_sync_h2d"]
    assert uploads == {"count": 1, "bytes": 64 * 64 * 4}
    assert torch.equal(cache.cpu(), torch.full((64, 64), 6.0))


def test_inference_mode_on_the_outside() -> None:
    cache = bound(torch.zeros(4))
    step = on_npu(lambda c: c.add_(1))
    with torch.inference_mode():
        step(cache)
    step(cache)
    with torch.inference_mode():
        step(cache)
    assert torch.equal(cache.cpu(), torch.full((4,), 3.0))


def test_eight_threads_each_on_its_own_stream() -> None:
    step = on_npu(lambda c, x: (c.add_(x), c * 2)[1])
    with torch.no_grad():
        step(bound(torch.zeros(16, 16)), bound(torch.zeros(16, 16)))
    failures: list[str] = []
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        stream = torch.rbln.Stream(0)
        cache, want = bound(torch.zeros(16, 16)), torch.zeros(16, 16)
        x = bound(torch.zeros(16, 16))
        start.wait()
        with torch.rbln.stream(stream), torch.no_grad():
            for run in range(20):
                # Named: the copy reads it until the graph has run.
                values = torch.randn(16, 16, generator=generator).pin_memory()
                x.copy_(values, non_blocking=True)
                out = step(cache, x)
                want += values
                if not torch.equal(out.cpu(), want * 2):
                    failures.append(f"thread {seed}, run {run}")
        if not torch.equal(cache.cpu(), want):
            failures.append(f"thread {seed}, cache")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# A graph after an asynchronous copy into its input, without a synchronization: in
# deferred mode the input holds poison until something waits for the copy.
_DEFERRED = """
import torch
from rebel.core.torch_compile import rbln_backend

def simulated(graph, inputs, **kwargs):
    return rbln_backend(graph, inputs, **kwargs)

step = torch.compile(
    lambda c, x: (c.copy_(x), x + 1)[1], backend=simulated, dynamic=False
)
x = torch.empty(256, 256, device="rbln:0")
cache = torch.empty(256, 256, device="rbln:0")
for tensor in (x, cache):
    torch.rbln.bind_device_memory(tensor)
with torch.no_grad():
    step(cache, x)
    for run in range(20):
        stream = torch.rbln.Stream(0)
        with torch.rbln.stream(stream):
            values = torch.full((256, 256), float(run)).pin_memory()
            x.copy_(values, non_blocking=True)
            out = step(cache, x)
            assert (out.cpu() == run + 1).all(), run
            assert (cache.cpu() == run).all(), run
        torch.rbln.synchronize()
print("in order")
"""


@pytest.mark.parametrize("deferred", ["latest", "1"])
def test_a_graph_runs_behind_queued_copies(
    deferred: str, rbln_sim_fork: RunPython
) -> None:
    result = rbln_sim_fork(_DEFERRED, RBLN_SIM_DEFERRED=deferred)
    assert result.stdout.endswith("in order\n"), result.stderr


def test_rows_do_not_depend_on_the_batch() -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(8, 256, generator=gen).half()
    w = torch.randn(512, 256, generator=gen).half()

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        hidden = torch.nn.functional.linear((x * scale).half(), w)
        return torch.matmul(torch.nn.functional.silu(hidden), w)

    run, weights = on_npu(block), w.to("rbln:0")
    together = run(x.to("rbln:0"), weights).cpu()
    for rows in (1, 2, 3, 5):
        part = run(x[:rows].to("rbln:0"), weights).cpu()
        assert torch.equal(part, together[:rows])


def test_the_runtime_runs_into_given_tensors_as_eager_operators_do() -> None:
    holder: list = []
    run = on_npu(lambda a, b: a * b, _runtime_holder=holder)
    a, b = bound(torch.tensor([2.0, 3.0])), bound(torch.tensor([5.0, 7.0]))
    assert torch.equal(run(a, b).cpu(), torch.tensor([10.0, 21.0]))
    (runtime,) = holder
    first, second = runtime._input_binding.validated
    assert first() is a
    assert second() is b
    out = bound(torch.zeros(2))
    (returned,) = runtime.run(a, b, out=[out])
    assert returned is out
    assert torch.equal(out.cpu(), torch.tensor([10.0, 21.0]))
    with pytest.raises(ValueError, match="1 outputs, got 2 tensors"):
        runtime.run(a, b, out=[out, out])
    with pytest.raises(ValueError, match=r"must have the shape \(2,\), got \(3,\)"):
        runtime.run(a, b, out=[bound(torch.zeros(3))])


def test_an_eager_operator_on_the_device() -> None:
    x = torch.randn(4, 64).half()
    device = x.to("rbln:0")
    assert torch.equal((device + device).cpu(), x + x)
    assert torch.equal(
        torch.mm(device, device.t().contiguous()).cpu(),
        (x.double() @ x.double().T).half(),
    )


def test_memory_that_is_not_the_devices_is_refused() -> None:
    tensor = bound(torch.zeros(1024))
    wrong = SimpleNamespace(
        untyped_storage=lambda: SimpleNamespace(
            nbytes=lambda: 2**30, data_ptr=tensor.data_ptr
        ),
        shape=(2**28,),
        dtype=torch.float32,
        device=tensor.device,
    )
    with pytest.raises(RuntimeError, match=r"\+1073741824 bytes.*on rbln:0 is not"):
        host_alias(wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"mode": ["compile_only"]}, "compile_only"), ({"dtype": "float16"}, "dtype=")],
)
def test_options_that_are_not_simulated_are_refused(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(Exception, match=message) as error:
        on_npu(lambda x: x + 1, **options)(torch.zeros(2).to("rbln:0"))
    assert "not supported by the simulated NPU" in str(error.value)


def test_graphs_that_own_something_are_refused() -> None:
    class Owner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Identity()
            self.weight = torch.nn.Parameter(torch.zeros(2).to("rbln:0"))

    def refused(target: str, op: str) -> str:
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        args = (x,) if op == "call_module" else ()
        graph.output((graph.create_node(op, target, args),))
        with pytest.raises(NotImplementedError) as error:
            rbln_backend(torch.fx.GraphModule(Owner(), graph), [])
        return str(error.value)

    assert "calls the module 'inner'" in refused("inner", "call_module")
    assert "owns the device tensor 'weight'" in refused("weight", "get_attr")
    branch = on_npu(
        lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
    )
    with pytest.raises(Exception, match="higher-order operator with the subgraph"):
        branch(torch.ones(2).to("rbln:0"))


def test_a_kv_cache_without_memory_is_refused() -> None:
    # What vllm-rbln hands over when its device tensors are switched off.
    run = on_npu(lambda x, kv: kv.add_(x))
    with pytest.raises(NotImplementedError, match="VLLM_RBLN_USE_DEVICE_TENSOR=1"):
        run(torch.zeros(2, device="meta"), torch.zeros(2, device="meta"))


def test_custom_kernels_are_replaced_in_the_graph() -> None:
    library = torch.library.Library("rbln_triton_ops", "FRAGMENT")
    name = "causal_attention_naive_decode"
    if not hasattr(torch.ops.rbln_triton_ops, name):  # vllm-rbln defines it, too
        library.define(
            f"{name}(Tensor q, Tensor k, Tensor v, Tensor kv, Tensor seq_idx, "
            "Tensor scale, Tensor block_table, Tensor dummy) -> Tensor"
        )
        torch.library.register_fake(
            f"rbln_triton_ops::{name}",
            lambda q, *rest: torch.empty_like(q),
            lib=library,
        )
    op = getattr(torch.ops.rbln_triton_ops, name)
    rows = torch.randn(3, 1, 2, 1, 1, 64).half()
    cache = bound(torch.zeros(2, 3, 2, 1, 8, 64).half())
    inputs = [t.to("rbln:0") for t in (*rows, torch.tensor([[0]]))]
    scale, table = torch.tensor(1.0), torch.tensor([[2]])

    def attend(*args: torch.Tensor) -> torch.Tensor:
        q, k, v, seq_idx, kv, scale, table = args
        out: torch.Tensor = op(q, k, v, kv, seq_idx, scale, table, scale)
        return out

    out = on_npu(attend)(*inputs, cache, scale.to("rbln:0"), table.to("rbln:0"))
    # One key: its value is the result.
    assert torch.equal(out.cpu(), rows[2])
    assert torch.equal(cache.cpu()[:, 2, :, :, :1], rows[1:, 0])
    assert cache.cpu().count_nonzero() == 2 * 2 * 64
