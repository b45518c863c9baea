# SPDX-License-Identifier: Apache-2.0
"""Device memory through the real torch-rbln: copies, residency, counters, limits."""

# Standard
from typing import Any
import ctypes

# Third Party
import pytest
import torch

# First Party
from rbln_sim.pytest_plugin import RunPython
from rbln_sim.activation import library_path

pytestmark = [pytest.mark.sim, pytest.mark.npu]
MIB = 1 << 20


def _random(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    size = torch.empty(shape, dtype=dtype).nbytes
    data = torch.randint(0, 255, (size,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(
        left.cpu().contiguous().view(torch.uint8),
        right.cpu().contiguous().view(torch.uint8),
    )


def _bound(source: torch.Tensor, device: str = "rbln:0") -> torch.Tensor:
    tensor = torch.empty(source.shape, dtype=source.dtype, device=device)
    torch.rbln.bind_device_memory(tensor)
    tensor.copy_(source)
    return tensor


def _residency(region: Any) -> tuple[int, int, int, int]:
    """Real copies down and up, hidden bounces and rejects of an explain region."""
    told = region.dump()["runtime_residency"]
    rejects = told["reject"]["user_actionable"]
    return (
        told["real_host_sync_d2h"]["count"],
        told["real_host_sync_h2d"]["count"],
        told["total_count"],
        sum(entry["count"] for entry in rejects.values()),
    )


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn],
)
@pytest.mark.parametrize("bind", [False, True])
def test_round_trip(dtype: torch.dtype, bind: bool) -> None:
    source = _random(3, 5, 7, dtype=dtype)
    tensor = _bound(source) if bind else source.to("rbln")
    assert _same_bytes(tensor, source)


def test_a_slice_changes_only_itself() -> None:
    source = _random(8, 100)
    for tensor in (source.to("rbln"), _bound(source)):
        tensor[3, 10:20].copy_(torch.ones(10, dtype=torch.float16))
        want = source.clone()
        want[3, 10:20] = 1
        assert _same_bytes(tensor, want)


def test_two_devices_are_two_memories() -> None:
    if torch.rbln.device_count() < 2:
        pytest.skip("one device")
    source = _random(4, 100)
    first, second = _bound(source, "rbln:0"), _bound(source + 1, "rbln:1")
    assert first.device.index == 0 and second.device.index == 1
    second.copy_(first)
    assert _same_bytes(second, source)


def test_a_tensor_made_lazily_takes_no_device_memory() -> None:
    before = torch.rbln.memory_allocated()
    tensor = _random(MIB).to("rbln")
    assert torch.rbln.memory_allocated() == before
    torch.rbln.bind_device_memory(tensor)
    assert torch.rbln.memory_allocated() == before + 2 * MIB
    free, total = torch.rbln.mem_get_info()
    assert total - free >= 2 * MIB
    del tensor
    assert torch.rbln.memory_allocated() == before


def test_figures_of_chiplets_add_up() -> None:
    tensor = _bound(_random(MIB))
    stats = torch.rbln.memory_stats()
    per_chiplet = torch.rbln.memory_stats_per_chiplet()
    for key in ("allocated.current", "reserved.current", "active.current", "num_ooms"):
        parts = [value for name, value in per_chiplet.items() if name.endswith(key)]
        assert len(parts) == 4
        assert sum(parts) == stats[key]
    info = torch.rbln.mem_get_info_per_chiplet()
    free, total = torch.rbln.mem_get_info()
    for field, value in (("total", total), ("free", free)):
        keys = [f"npu.0.chiplet.{chiplet}.{field}" for chiplet in range(4)]
        assert sum(info[key] for key in keys) == value
    properties = torch.rbln.get_device_properties(0)
    assert properties.num_chiplet == 4
    assert properties.memory_per_chiplet * 4 == properties.total_memory == total
    del tensor


def test_peaks_can_be_reset() -> None:
    torch.rbln.reset_peak_memory_stats()
    torch.rbln.reset_accumulated_memory_stats()
    before = torch.rbln.memory_allocated()
    tensor = _bound(_random(MIB))
    del tensor
    assert torch.rbln.max_memory_allocated() == before + 2 * MIB
    stats = torch.rbln.memory_stats()
    assert stats["num_device_alloc"] == stats["num_device_free"] == 1
    torch.rbln.reset_peak_memory_stats()
    assert torch.rbln.max_memory_allocated() == before


def test_transfers_of_a_bound_cache_hide_nothing() -> None:
    cache = _bound(_random(16, 2, 4, 1, 16, 8))
    pinned = torch.empty(cache.shape, dtype=cache.dtype, pin_memory=True)
    with torch.rbln.explain() as region:
        pinned.copy_(cache, non_blocking=True)
        torch.rbln.synchronize()
        cache.copy_(pinned, non_blocking=True)
        torch.rbln.synchronize()
    assert region.verdict()["clean"], region.report()
    assert _residency(region) == (0, 0, 0, 0)


def test_synchronous_transfers_of_a_bound_cache_are_counted() -> None:
    source = _random(16, 100)
    cache = _bound(source)
    with torch.rbln.explain() as region:
        for row in range(3):
            assert _same_bytes(cache[row], source[row])
        cache[5].copy_(source[6])
    assert _residency(region) == (3, 1, 0, 0)
    told = region.dump()["runtime_residency"]
    assert told["real_host_sync_d2h"]["bytes"] == 3 * 200
    assert told["real_host_sync_h2d"]["bytes"] == 200
    assert region.verdict()["clean"]


def test_host_latest_tensors_are_served_by_the_host() -> None:
    with torch.rbln.explain() as region:
        tensor = _random(100).to("rbln")
        tensor.cpu()
        tensor[:10].copy_(torch.zeros(10, dtype=torch.float16))
    assert _residency(region) == (0, 0, 0, 0)


def test_a_device_copy_of_a_host_latest_tensor_is_told() -> None:
    source = _random(100).to("rbln")
    target = torch.empty_like(source)
    with torch.rbln.explain() as region:
        target.copy_(source)
    assert _residency(region) == (0, 0, 1, 1)
    told = region.dump()["runtime_residency"]
    wanted = {"count": 1, "bytes": 200}
    assert told["reject"]["user_actionable"] == {"src_not_on_device": wanted}
    assert told["by_reason"]["src_not_on_device"] == wanted
    assert not region.verdict()["clean"]
    assert _same_bytes(target, source)


def test_a_device_copy_between_bound_tensors_is_clean() -> None:
    source, target = _bound(_random(100)), _bound(torch.zeros(100, dtype=torch.float16))
    with torch.rbln.explain() as region:
        target.copy_(source)
    assert _residency(region) == (0, 0, 0, 0)
    assert _same_bytes(target, source)


def test_zeros_are_zeros_without_a_transfer() -> None:
    cache = _bound(_random(MIB))
    with torch.rbln.explain() as region:
        cache.zero_()
        fresh = torch.zeros(MIB, dtype=torch.float16, device="rbln")
        torch.rbln.bind_device_memory(fresh)
    assert _residency(region)[:2] == (0, 0)
    assert not cache.cpu().any()
    assert not fresh.cpu().any()


def test_batched_copies() -> None:
    layers = [_bound(_random(4, 50) + layer) for layer in range(3)]
    hosts = [torch.zeros(4, 50, dtype=torch.float16) for _ in layers]
    torch._foreach_copy_(hosts, layers)
    for host, layer in zip(hosts, layers, strict=True):
        assert _same_bytes(host, layer)
    torch._foreach_copy_(layers, [host + 1 for host in hosts])
    for host, layer in zip(hosts, layers, strict=True):
        assert _same_bytes(layer, host + 1)


def test_operators_without_a_device_kernel_see_the_newest_bytes() -> None:
    for tensor in (torch.arange(100.0).to("rbln"), _bound(torch.arange(100.0))):
        tensor.add_(1)
        assert tensor.sum().item() == 5050
        tensor[10:20].mul_(0)
        assert tensor.sum().item() == 5050 - sum(range(11, 21))


def test_a_bound_tensor_takes_its_layout_from_another() -> None:
    cache = _bound(_random(16, 100))
    staging = torch.empty(4, 100, dtype=torch.float16, device="rbln")
    torch.rbln.set_device_layout_like(staging, cache)
    staging.copy_(_random(4, 100))
    with torch.rbln.explain() as region:
        cache[4:8].copy_(staging)
    assert _residency(region) == (0, 0, 0, 0)
    assert _same_bytes(cache[4:8], staging)


def test_out_of_memory_is_an_error_and_is_counted(rbln_sim_fork: RunPython) -> None:
    done = rbln_sim_fork(
        """
        import torch
        cache = torch.empty(600 << 20, dtype=torch.uint8, device="rbln")
        torch.rbln.bind_device_memory(cache)
        other = torch.empty(600 << 20, dtype=torch.uint8, device="rbln")
        try:
            torch.rbln.bind_device_memory(other)
        except RuntimeError as error:
            print(str(error).splitlines()[0])
        print(torch.rbln.memory_stats()["num_ooms"])
        del cache
        torch.rbln.bind_device_memory(other)
        """,
        RBLN_SIM_MEMORY_GIB="1",
    )
    assert done.returncode == 0, done.stderr
    error, ooms = done.stdout.splitlines()[-2:]
    assert "rbln_set_raw_memory_alloc failed" in error
    assert ooms == "1"
    assert "out of device memory: 629145600 bytes asked for" in done.stderr


def test_eager_allocation_takes_memory_at_once(rbln_sim_fork: RunPython) -> None:
    done = rbln_sim_fork(
        """
        import torch
        tensor = torch.empty(1 << 20, dtype=torch.uint8, device="rbln")
        print(torch.rbln.memory_allocated())
        """,
        TORCH_RBLN_EAGER_MALLOC="1",
    )
    assert done.stdout == f"{MIB}\n", done.stderr


def test_memory_is_committed_where_it_is_used(rbln_sim_fork: RunPython) -> None:
    done = rbln_sim_fork(
        """
        import resource, torch
        cache = torch.empty(12 << 30, dtype=torch.uint8, device="rbln")
        torch.rbln.bind_device_memory(cache)
        cache[6 << 30 : (6 << 30) + 5].copy_(torch.ones(5, dtype=torch.uint8))
        assert cache[6 << 30 : (6 << 30) + 6].cpu().tolist() == [1, 1, 1, 1, 1, 0]
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        """
    )
    assert int(done.stdout) < 2 << 20, done.stderr


def test_a_device_address_is_not_host_memory(rbln_sim_fork: RunPython) -> None:
    done = rbln_sim_fork(
        """
        import ctypes, torch
        tensor = torch.ones(4, device="rbln")
        torch.rbln.bind_device_memory(tensor)
        ctypes.string_at(tensor.data_ptr(), 4)
        """
    )
    assert done.returncode == -11


def test_a_copy_past_the_end_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    tensor = _bound(torch.zeros(100, dtype=torch.uint8))
    buffer = ctypes.create_string_buffer(b"x" * 200, 200)
    library = ctypes.CDLL(str(library_path()))
    copy = library._ZN4rbln15rbln_memcpy_v2hEmmm
    copy.argtypes = [ctypes.c_uint64] * 3
    host = ctypes.addressof(buffer)
    assert copy(tensor.data_ptr() + 50, host, 50) == 0
    assert copy(tensor.data_ptr() + 50, host, 51) == 2
    assert "rbln_memcpy_v2h: 51 bytes at 0x" in capfd.readouterr().err
    address = tensor.data_ptr()
    del tensor
    assert copy(address, host, 1) == 2
    assert "is stale" in capfd.readouterr().err


def test_a_use_after_free_does_not_reach_a_newer_tensor() -> None:
    tensor = _bound(torch.zeros(100, dtype=torch.uint8))
    address = tensor.data_ptr()
    del tensor
    newer = [_bound(torch.zeros(100, dtype=torch.uint8)) for _ in range(50)]
    assert address not in [tensor.data_ptr() for tensor in newer]


def test_a_logical_device_may_span_npus(rbln_sim_fork: RunPython) -> None:
    done = rbln_sim_fork(
        """
        import torch
        properties = torch.rbln.get_device_properties(0)
        print(torch.rbln.device_count(), torch.rbln.physical_device_count(),
              properties.npu_count, properties.total_memory >> 30)
        tensor = torch.empty(3 << 30, dtype=torch.uint8, device="rbln")
        torch.rbln.bind_device_memory(tensor)
        stats = torch.rbln.memory_stats_per_chiplet()
        chiplets = [f"npu.{n}.chiplet.{c}" for n in (0, 1) for c in range(4)]
        print({stats[f"{c}.allocated.current"] << 3 for c in chiplets} == {3 << 30})
        free, total = torch.rbln.mem_get_info()
        print(free >> 30, total >> 30)
        """,
        RBLN_SIM_DEVICES="2",
        RBLN_SIM_MEMORY_GIB="2",
        RBLN_NPUS_PER_DEVICE="2",
    )
    assert done.stdout == "1 2 2 4\nTrue\n1 4\n", done.stderr


_AT_EXIT = """
import atexit, torch
kept = [torch.ones(4, device="rbln"), torch.ones(4, pin_memory=True)]
if {release}:
    atexit.register(kept.clear)
"""


@pytest.mark.parametrize("release", [False, True], ids=["kept", "released"])
def test_what_torch_rbln_says_of_device_memory_that_is_alive_at_the_end(
    rbln_sim_run: RunPython, release: bool
) -> None:
    """Its own hook ends the runtime first; a hook registered later runs before it."""
    ended = rbln_sim_run(_AT_EXIT.format(release=release))
    assert ended.returncode == 0, ended.stderr
    told = "leaking rather than crashing" in ended.stdout + ended.stderr
    assert told is not release
