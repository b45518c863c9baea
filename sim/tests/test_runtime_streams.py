# SPDX-License-Identifier: Apache-2.0
"""Streams, events and pinned memory through the real torch-rbln."""

# Standard
from concurrent.futures import ThreadPoolExecutor

# Third Party
import pytest
import torch

# First Party
from rbln_sim.pytest_plugin import RunPython

pytestmark = [pytest.mark.sim, pytest.mark.npu]

# Code for a process in deferred mode, where a copy runs when something waits for it:
# 100 bound rows of ones and pinned rows of zeros.
DEFERRED = """
import torch
device = torch.empty(100, 4096, dtype=torch.uint8, device="rbln")
torch.rbln.bind_device_memory(device)
device.copy_(torch.ones(100, 4096, dtype=torch.uint8))
pinned = torch.zeros(100, 4096, dtype=torch.uint8, pin_memory=True)
stream, other = torch.rbln.Stream(), torch.rbln.Stream()

def start(rows, down=True, first=0):
    with torch.rbln.stream(stream):
        for row in range(first, rows):
            if down:
                pinned[row].copy_(device[row], non_blocking=True)
            else:
                device[row].copy_(pinned[row], non_blocking=True)
"""
POISON = 0xA5


def _run_deferred(rbln_sim_fork: RunPython, code: str) -> list[str]:
    done = rbln_sim_fork(DEFERRED + code, RBLN_SIM_DEFERRED="latest")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def _bound(values: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty(values.shape, dtype=values.dtype, device="rbln")
    torch.rbln.bind_device_memory(tensor)
    tensor.copy_(values)
    return tensor


def test_pinned_memory_is_torch_rblns_own() -> None:
    pinned = torch.empty(100, pin_memory=True)
    assert pinned.is_pinned()
    assert not torch.empty(100).is_pinned()


def test_the_current_stream_is_set_and_restored() -> None:
    default = torch.rbln.default_stream()
    stream = torch.rbln.Stream()
    assert torch.rbln.current_stream() == default
    assert default.stream_id == 0
    with torch.rbln.stream(stream):
        assert torch.rbln.current_stream() == stream
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.rbln.current_stream).result() == default
    assert torch.rbln.current_stream() == default


def test_streams_of_two_devices() -> None:
    if torch.rbln.device_count() < 2:
        pytest.skip("one device")
    first, second = torch.rbln.Stream("rbln:0"), torch.rbln.Stream("rbln:1")
    with torch.rbln.stream(second):
        assert torch.rbln.current_stream("rbln:1") == second
        assert torch.rbln.current_stream("rbln:0").stream_id == 0
    event = torch.rbln.Event()
    event.record(second)
    first.wait_event(event)
    first.synchronize()


def test_events() -> None:
    stream = torch.rbln.Stream()
    event = torch.rbln.Event()
    assert event.query()
    event.record(stream)
    event.synchronize()
    assert event.query()
    assert stream.query()


def test_a_copy_is_there_after_the_wait(rbln_sim_fork: RunPython) -> None:
    code = """
def spin():
    while not stream.query(): pass
for wait in (
    stream.synchronize,
    torch.rbln.synchronize,
    lambda: stream.record_event().synchronize(),
    lambda: (other.wait_stream(stream), other.synchronize()),
    lambda: (other.wait_event(stream.record_event()), other.synchronize()),
    spin,
):
    pinned.zero_()
    start(3)
    wait()
    print(pinned.sum().item())
"""
    assert _run_deferred(rbln_sim_fork, code) == [str(3 * 4096)] * 6


def test_a_missing_wait_shows(rbln_sim_fork: RunPython) -> None:
    code = f"""
start(100)
print(bool((pinned == {POISON}).all()), stream.query())
print(bool((pinned == {POISON}).all()))
while not stream.query(): pass
print(pinned.sum().item())
"""
    want = ["True", "False", "True", str(100 * 4096)]
    assert _run_deferred(rbln_sim_fork, code) == want


def test_an_event_recorded_before_the_copies_does_not_cover_them(
    rbln_sim_fork: RunPython,
) -> None:
    code = """
start(1)
event = stream.record_event()
start(100, first=1)
event.synchronize()
print(pinned[0, 0].item(), set(pinned[1:].flatten().tolist()), stream.query())
"""
    assert _run_deferred(rbln_sim_fork, code) == ["1", f"{{{POISON}}}", "False"]


def test_a_synchronous_copy_waits_for_its_own_stream_only(
    rbln_sim_fork: RunPython,
) -> None:
    code = """
start(100, down=False)
print(device[99, :1].cpu().item(), stream.query())
with torch.rbln.stream(stream):
    print(device[99, :1].cpu().item(), stream.query())
"""
    assert _run_deferred(rbln_sim_fork, code) == [str(POISON), "False", "0", "True"]


def test_freeing_a_tensor_in_flight_is_safe(rbln_sim_fork: RunPython) -> None:
    code = """
start(100)
held = torch.rbln.memory_allocated()
del device
print(torch.rbln.memory_allocated() == held > 0)
stream.synchronize()
print(pinned.sum().item(), torch.rbln.memory_allocated())
"""
    assert _run_deferred(rbln_sim_fork, code) == ["True", str(100 * 4096), "0"]


def test_streams_and_events_dropped_in_flight(rbln_sim_fork: RunPython) -> None:
    code = """
start(3)
event = stream.record_event()
other.wait_event(event)
del stream, event
other.synchronize()
print(pinned.sum().item())
"""
    assert _run_deferred(rbln_sim_fork, code) == [str(3 * 4096)]


def test_copies_of_many_threads_and_streams() -> None:
    layers = [torch.randint(0, 255, (64, 1024), dtype=torch.uint8) for _ in range(4)]
    device_layers = [_bound(layer) for layer in layers]

    def store(worker: int) -> bool:
        stream = torch.rbln.Stream()
        pinned = torch.empty(64, 1024, dtype=torch.uint8, pin_memory=True)
        equal = True
        for round_ in range(20):
            layer = (worker + round_) % len(layers)
            with torch.rbln.stream(stream):
                for row in range(64):
                    pinned[row].copy_(device_layers[layer][row], non_blocking=True)
                stream.record_event().synchronize()
            equal &= torch.equal(pinned, layers[layer])
        return equal

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(store, range(8)))


def test_a_process_ends_with_work_in_flight(rbln_sim_run: RunPython) -> None:
    code = DEFERRED + 'start(100)\nprint("end")'
    done = rbln_sim_run(code, RBLN_SIM_DEFERRED="latest")
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
