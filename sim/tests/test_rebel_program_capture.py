# SPDX-License-Identifier: Apache-2.0
"""``torch.rbln.capture_programs`` and graphs with a dynamic dimension."""

# Standard
import threading
from collections.abc import Callable, Iterator
from typing import Any

# Third Party
import pytest
import torch

pytest.importorskip("rebel._device", reason="tests the simulator itself")

pytestmark = pytest.mark.sim

DEVICES = [f"rbln:{index}" for index in range(torch.rbln.device_count())]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(cache: torch.Tensor, row: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(0, block, row)
    return cache[1] * 2


def cache_of(blocks: int, device: str = "rbln:0") -> torch.Tensor:
    cache = torch.zeros(blocks, 2, 8).to(device)
    torch._dynamo.mark_dynamic(cache, 0)
    return cache


def run(
    compiled: Callable[..., torch.Tensor], cache: torch.Tensor, block: int
) -> torch.Tensor:
    row = torch.full((1, 2, 8), float(block)).to(cache.device)
    with torch.no_grad():
        return compiled(cache, row, torch.tensor([block]).to(cache.device))


@pytest.mark.parametrize("device", DEVICES)
def test_a_program_tells_where_its_dynamic_input_lies(device: str) -> None:
    with torch.rbln.capture_programs() as programs:
        compiled = torch.compile(step, backend="rbln", dynamic=False)
        run(compiled, cache_of(4, device), 1)
    (program,) = programs
    assert program.name == "0/0"
    assert program.device == torch.device(device)
    dynamic = [s for s in program.input_specs if s.physical_placement is not None]
    (cache,) = dynamic
    assert cache.shape == (4, 2, 8)
    assert cache.dtype == "float32"
    placement = cache.physical_placement
    kind, symbol = placement.shape[0]
    assert kind == "symbol"
    assert placement.shape[1:] == (2, 8)
    assert placement.dtype == "float32"
    pieces = {(s.node_id, s.chiplet_id): s.slice_shape for s in placement.shards}
    piece = (("symbol", symbol), 2, 2)
    assert pieces == {(0, chiplet): piece for chiplet in range(4)}
    # Where the driver reports memory under the same names.
    free = torch.rbln.mem_get_info_per_chiplet(program.device)
    assert all(f"npu.{node}.chiplet.{chip}.total" in free for node, chip in pieces)
    (output,) = program.output_specs
    assert (output.shape, output.dtype) == ((2, 8), "float32")


def test_a_larger_cache_runs_on_the_same_program() -> None:
    with torch.rbln.capture_programs() as programs:
        compiled = torch.compile(step, backend="rbln", dynamic=False)
        run(compiled, cache_of(4), 1)
        for program in programs:
            program.runtime.reset_adaptive_buffers()
        cache = cache_of(9)
        out = run(compiled, cache, 8)
    assert len(programs) == 1
    assert torch.equal(out.cpu(), torch.zeros(2, 8))
    assert torch.equal(cache[8].cpu(), torch.full((2, 8), 8.0))


def test_scopes_nest_and_belong_to_their_thread() -> None:
    elsewhere: list = []

    def listen(opened: threading.Event, closed: threading.Event) -> None:
        with torch.rbln.capture_programs() as programs:
            opened.set()
            closed.wait(600)
        elsewhere.extend(programs)

    opened, closed = threading.Event(), threading.Event()
    thread = threading.Thread(target=listen, args=(opened, closed))
    thread.start()
    opened.wait(600)
    x = torch.ones(2).to("rbln:0")
    with torch.rbln.capture_programs() as outer:
        torch.compile(lambda x: x + 1, backend="rbln", dynamic=False)(x)
        with torch.rbln.capture_programs() as inner:
            torch.compile(lambda x: x + 2, backend="rbln", dynamic=False)(x)
    torch.compile(lambda x: x + 3, backend="rbln", dynamic=False)(x)
    closed.set()
    thread.join()
    assert [len(outer), len(inner), len(elsewhere)] == [2, 1, 0]
    assert outer[1].runtime is inner[0].runtime
    assert all(s.physical_placement is None for p in outer for s in p.input_specs)


def test_a_dimension_that_cannot_be_split_over_chiplets_is_refused() -> None:
    cache = torch.zeros(4, 2, 6).to("rbln:0")
    torch._dynamo.mark_dynamic(cache, 0)

    def simulated(graph: Any, inputs: Any, **kwargs: Any) -> Any:
        # Third Party
        from rebel.core.torch_compile import rbln_backend

        return rbln_backend(graph, inputs, **kwargs)

    with (
        torch.rbln.capture_programs(),
        pytest.raises(Exception, match="must be a multiple of 4"),
    ):
        torch.compile(lambda c: c + 1, backend=simulated, dynamic=False)(cache)
