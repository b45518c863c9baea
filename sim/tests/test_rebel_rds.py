# SPDX-License-Identifier: Apache-2.0
"""The simulated direct storage: bytes, rules, capacity, faults, several processes."""

# Standard
import errno
import importlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Third Party
import pytest
import torch

rds = pytest.importorskip("rebel.rds", reason="tests the simulator itself")
vmem = importlib.import_module("rebel._C.vmem")
service_of = importlib.import_module("rebel.rds._service")
settings_of = importlib.import_module("rebel.rds._settings")
faults = importlib.import_module("rebel.rds._faults")
order_module = importlib.import_module("rebel.rds._order")

pytestmark = pytest.mark.sim

UNIT = 4096
MIB = 1 << 20


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a storage of the test's own from RBLN_SIM_RDS_* settings."""

    def make(gib: float = 0.01, faults: str = "", deferred: str = "0") -> Any:
        monkeypatch.setenv("RBLN_SIM_RDS_FILE", str(tmp_path / "nvme.img"))
        monkeypatch.setenv("RBLN_SIM_RDS_GIB", str(gib))
        monkeypatch.setenv("RBLN_SIM_RDS_FAULTS", faults)
        monkeypatch.setenv("RBLN_SIM_DEFERRED", deferred)
        settings_of.settings.cache_clear()
        service_of._service_of.cache_clear()
        return service_of.service()

    yield make
    settings_of.settings.cache_clear()
    service_of._service_of.cache_clear()


def device_tensor(nbytes: int, seed: int | None = None) -> torch.Tensor:
    """A bound tensor of bytes on rbln:0, random if a seed is given."""
    tensor = torch.empty(nbytes, dtype=torch.uint8, device="rbln:0")
    torch.rbln.bind_device_memory(tensor)
    if seed is not None:
        tensor.copy_(host_bytes(nbytes, seed))
    return tensor


def host_bytes(nbytes: int, seed: int) -> torch.Tensor:
    data = random.Random(seed).randbytes(nbytes)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def buffer_of(tensor: torch.Tensor) -> Any:
    [buffer] = vmem.get_device_buffers(tensor.data_ptr())
    return buffer


def on_file(chunk: Any, offset: int, nbytes: int) -> bytes:
    path, start = chunk.sim_location
    with open(path, "rb") as file:
        file.seek(start + offset)
        return file.read(nbytes)


@pytest.mark.parametrize("nbytes", [UNIT, 64 * UNIT, 3 * MIB])
@pytest.mark.parametrize("queued", [False, True])
def test_bytes_go_to_the_file_and_back(storage: Any, nbytes: int, queued: bool) -> None:
    storage()
    source, target = device_tensor(nbytes, 1), device_tensor(nbytes, 2)
    chunk = rds.Chunk(size=nbytes + 2 * UNIT, device=0)
    if queued:
        with rds.Stream(device=0, node_id=0) as stream:
            chunk.write(buffer_of(source), file_offset=UNIT, stream=stream)
        with rds.Stream(device=0, node_id=0) as stream:
            chunk.read(buffer_of(target), file_offset=UNIT, stream=stream)
        rds.mark_device_updated(target.data_ptr())
    else:
        chunk.write(buffer_of(source), file_offset=UNIT)
        chunk.read(buffer_of(target), file_offset=UNIT)
    want = host_bytes(nbytes, 1)
    assert on_file(chunk, UNIT, nbytes) == want.numpy().tobytes()
    assert torch.equal(target.cpu(), want)
    chunk.close()
    chunk.close()


def test_the_host_sees_poison_until_the_runtime_is_told(storage: Any) -> None:
    storage()
    source, target = device_tensor(MIB, 1), device_tensor(MIB, 2)
    other = device_tensor(MIB, 3)
    chunk = rds.Chunk(size=MIB, device=0)
    chunk.write(buffer_of(source))
    with rds.Stream() as stream:
        chunk.read(buffer_of(target), stream=stream)
    assert torch.equal(target.cpu(), torch.full((MIB,), 0xA5, dtype=torch.uint8))
    other.copy_(target)  # stays on the device
    assert torch.equal(other.cpu(), host_bytes(MIB, 1))
    rds.mark_device_updated(target.data_ptr())
    assert torch.equal(target.cpu(), host_bytes(MIB, 1))
    chunk.close()


def test_a_queued_read_runs_when_it_is_waited_for(storage: Any) -> None:
    storage(deferred="latest")
    source, target = device_tensor(MIB, 1), device_tensor(MIB, 2)
    chunk = rds.Chunk(size=MIB, device=0)
    chunk.write(buffer_of(source))
    with rds.Stream() as stream:
        chunk.read(buffer_of(target), stream=stream)
        early = device_tensor(MIB, 4)
        early.copy_(target)
    rds.mark_device_updated(target.data_ptr())
    assert torch.equal(early.cpu(), torch.full((MIB,), 0xA5, dtype=torch.uint8))
    assert torch.equal(target.cpu(), host_bytes(MIB, 1))
    chunk.close()


@pytest.mark.parametrize("deferred", ["latest", "earliest", "1", "2", "3"])
def test_queued_transfers_are_right_in_every_order(storage: Any, deferred: str) -> None:
    storage(deferred=deferred, faults="delay:any:1:1000s+sticky")
    sources = [device_tensor(UNIT, seed) for seed in range(8)]
    targets = [device_tensor(UNIT, 9) for _ in sources]
    chunk = rds.Chunk(size=len(sources) * UNIT, device=0)
    for move, tensors in ((chunk.write, sources), (chunk.read, targets)):
        with rds.Stream() as stream:
            for number, tensor in enumerate(tensors):
                move(buffer_of(tensor), file_offset=number * UNIT, stream=stream)
    for seed, target in enumerate(targets):
        rds.mark_device_updated(target.data_ptr())
        assert torch.equal(target.cpu(), host_bytes(UNIT, seed))
    chunk.close()


@pytest.mark.parametrize("deferred", ["latest", "earliest", "4"])
def test_a_failure_of_a_deferred_transfer_is_told_at_the_end(
    storage: Any, deferred: str
) -> None:
    storage(deferred=deferred, faults="eio:read:1")
    target = device_tensor(UNIT, 1)
    chunk = rds.Chunk(size=UNIT, device=0)
    queued = False
    with pytest.raises(OSError, match="fault eio:read:1"), rds.Stream() as stream:
        chunk.read(buffer_of(target), stream=stream)
        queued = True
    assert queued
    chunk.close()


def test_a_seed_is_an_order_of_transfers_and_seeds_differ() -> None:
    def order_of(setting: str) -> str:
        order, queued, ran = order_module.Order(setting), [], ""
        for name in "abcdefgh":
            queued.append(name)
            ran += "".join(order.take(queued, waited_for=False)) + "."
        return ran + "".join(order.take(queued, waited_for=True))

    assert order_of("earliest") == "a.b.c.d.e.f.g.h."
    assert order_of("latest") == "........hgfedcba"
    seeds = [str(seed) for seed in range(1, 21)]
    assert [order_of(seed) for seed in seeds] == [order_of(seed) for seed in seeds]
    assert len({order_of(seed) for seed in seeds}) == len(seeds)


def test_what_does_not_fit_is_refused(storage: Any) -> None:
    storage()
    tensor = device_tensor(2 * UNIT, 1)
    odd = device_tensor(UNIT + 512, 1)
    for size in (0, -UNIT, 100):
        with pytest.raises(ValueError, match=f"size={size} is not a positive multiple"):
            rds.Chunk(size=size, device=0)
    chunk = rds.Chunk(size=2 * UNIT, device=0)
    with pytest.raises(ValueError, match="file_offset=512 is not a multiple of 4096"):
        chunk.write(buffer_of(tensor), file_offset=512)
    with pytest.raises(ValueError, match="size=4608 is not a multiple of 4096"):
        chunk.read(buffer_of(odd))
    with pytest.raises(ValueError, match="8192 bytes at 4096 do not fit a chunk"):
        chunk.write(buffer_of(tensor), file_offset=UNIT)
    with pytest.raises(ValueError, match="inside an allocation"):
        vmem.get_device_buffers(tensor.data_ptr() + UNIT)
    with pytest.raises(RuntimeError, match="is in no live device allocation"):
        vmem.get_device_buffers(4096)
    chunk.close()
    with pytest.raises(RuntimeError, match="closed"):
        chunk.write(buffer_of(tensor))
    left = rds.Stream()
    other = rds.Chunk(size=2 * UNIT, device=0)
    with pytest.raises(RuntimeError, match="outside of its 'with' block"):
        other.write(buffer_of(tensor), stream=left)
    other.close()


def test_a_freed_tensor_is_refused(storage: Any) -> None:
    storage()
    tensor = device_tensor(UNIT, 1)
    buffer = buffer_of(tensor)
    chunk = rds.Chunk(size=UNIT, device=0)
    del tensor
    with pytest.raises(RuntimeError, match="cannot be used"):
        chunk.write(buffer)
    chunk.close()


def test_space_runs_out_and_comes_back(storage: Any) -> None:
    storage(gib=4 * MIB / 2**30)
    torch.rbln.synchronize()
    chunks = [rds.Chunk(size=MIB, device=0) for _ in range(4)]
    places = {chunk.sim_location[1] for chunk in chunks}
    assert places == {0, MIB, 2 * MIB, 3 * MIB}
    assert len({chunk.chunk_id for chunk in chunks}) == 4
    with pytest.raises(OSError, match="no 4096 free bytes") as full:
        rds.Chunk(size=UNIT, device=0)
    assert full.value.errno == errno.ENOSPC
    chunks[1].close()
    again = rds.Chunk(size=MIB, device=0)
    assert again.sim_location[1] == MIB
    for chunk in (*chunks, again):
        chunk.close()


def test_no_service(storage: Any) -> None:
    storage(gib=0)
    assert rds.query_available_device_count() == 0
    assert not rds.is_available()
    with pytest.raises(RuntimeError, match="no storage service"):
        rds.Chunk(size=UNIT, device=0)


def test_a_wrong_setting_is_no_service_and_named(storage: Any) -> None:
    with pytest.raises(ValueError, match="RBLN_SIM_RDS_GIB='many'"):
        storage(gib="many")
    assert not rds.is_available()


def test_one_device(storage: Any) -> None:
    storage()
    assert rds.query_available_device_count() == 1
    assert rds.is_available()


@pytest.mark.parametrize(
    ("rule", "kind", "number"),
    [
        ("eio:write:2", "write", errno.EIO),
        ("eio:read:1", "read", errno.EIO),
        ("enospc:write:1+sticky", "write", errno.ENOSPC),
        ("lost:3", "any", errno.ENODEV),
    ],
)
def test_faults_of_transfers(
    storage: Any, rule: str, kind: str, number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    storage(faults=rule)
    tensor = device_tensor(2 * UNIT, 1)
    chunk = rds.Chunk(size=2 * UNIT, device=0)
    seen: list[int | None] = []
    for transfer in ("write", "write", "read", "read"):
        with_stream = transfer == "read"
        try:
            if with_stream:
                with rds.Stream() as stream:
                    chunk.read(buffer_of(tensor), stream=stream)
            else:
                chunk.write(buffer_of(tensor))
            seen.append(0)
        except OSError as error:
            assert rule in str(error)
            seen.append(error.errno)
    want = {
        "eio:write:2": [0, number, 0, 0],
        "eio:read:1": [0, 0, number, 0],
        "enospc:write:1+sticky": [number, number, 0, 0],
        "lost:3": [0, 0, number, number],
    }
    assert seen == want[rule]
    assert f"{rule} strikes rds" in capfd.readouterr().err
    chunk.close()


def test_a_torn_write_reports_success(storage: Any) -> None:
    storage(faults="torn:write:2")
    first, second = device_tensor(4 * UNIT, 1), device_tensor(4 * UNIT, 2)
    chunk = rds.Chunk(size=4 * UNIT, device=0)
    chunk.write(buffer_of(first))
    chunk.write(buffer_of(second))
    old = host_bytes(4 * UNIT, 1).numpy().tobytes()
    new = host_bytes(4 * UNIT, 2).numpy().tobytes()
    assert on_file(chunk, 0, 4 * UNIT) == new[: 2 * UNIT] + old[2 * UNIT :]
    chunk.close()


def test_faults_by_probability_depend_on_the_seed_alone() -> None:
    def struck(seed: int) -> list[int]:
        schedule = faults.Schedule(faults.parse("eio:write:p=0.3"), seed)
        numbers = []
        for number in range(200):
            try:
                schedule.begin("write")
            except OSError:
                numbers.append(number)
            schedule.begin("read")  # must not move those of writes
        return numbers

    assert struck(1) == struck(1)
    assert struck(1) != struck(2)
    assert 30 < len(struck(1)) < 90


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("fail:write:1", "there is no action 'fail'"),
        ("eio:write", "it has 2 fields"),
        ("torn:read:1", "'torn' strikes write, not 'read'"),
        ("eio:write:0", "'0' is neither a position"),
        ("eio:write:p=2", "'p=2' is neither a position"),
        ("eio:write:p=0.0", "'p=0.0' is neither a position"),
        ("delay:read:1:3h", "'3h' is not a time"),
        ("lost:many", "'lost' takes the number"),
        ("lost:3+sticky", "'lost' takes the number"),
    ],
)
def test_a_rule_that_cannot_be_read_is_named(rule: str, why: str) -> None:
    with pytest.raises(ValueError, match=r"RBLN_SIM_RDS_FAULTS.*" + why) as error:
        faults.parse(f"eio:write:1,{rule}")
    assert f"'{rule}'" in str(error.value)


def test_rules_in_a_file_change_while_a_program_runs(
    storage: Any, tmp_path: Path
) -> None:
    file = tmp_path / "faults"

    def put(rules: str) -> None:
        file.with_suffix(".new").write_text(rules)
        file.with_suffix(".new").replace(file)

    def write() -> int | None:
        try:
            chunk.write(buffer_of(tensor))
        except OSError as error:
            return error.errno
        return 0

    put("")
    storage(faults=f"@{file}")
    tensor = device_tensor(UNIT, 1)
    chunk = rds.Chunk(size=UNIT, device=0)
    assert [write(), write()] == [0, 0]
    put("enospc:write:1+sticky\n")
    assert [write(), write()] == [errno.ENOSPC, errno.ENOSPC]
    put("lost:1")
    assert [write(), write(), write()] == [0, errno.ENODEV, errno.ENODEV]
    put("eio:write:2")
    assert [write(), write(), write()] == [0, errno.EIO, 0]
    put("eio:write:2")  # the same rules once more
    assert [write(), write()] == [0, errno.EIO]
    put("")
    assert [write(), write()] == [0, 0]
    put("eio:write")
    with pytest.raises(ValueError, match="cannot read the rule 'eio:write'"):
        write()
    file.unlink()
    with pytest.raises(ValueError, match="faults: No such file"):
        write()
    chunk.close()


@pytest.mark.parametrize(
    ("rules", "why"), [("eio:x:1", "'eio:x:1'"), (None, "No such")]
)
def test_a_file_of_rules_is_read_at_once(
    storage: Any, tmp_path: Path, rules: str | None, why: str
) -> None:
    file = tmp_path / "faults"
    if rules is not None:
        file.write_text(rules)
    with pytest.raises(ValueError, match=why):
        storage(faults=f"@{file}")


HOLD = """
import os, sys, torch
from rebel import rds
try:
    rds.Chunk(size=4096, device=0)
except RuntimeError as error:
    print(error)
torch.empty(1, device="rbln")
chunk = rds.Chunk(size=1 << 20, device=0)
print(chunk.sim_location[1])
sys.stdout.flush()
os.kill(os.getpid(), 9)
"""


def test_processes_share_the_device_and_never_a_byte(
    storage: Any, rbln_sim_fork: Any, tmp_path: Path
) -> None:
    storage(gib=4 * MIB / 2**30)
    torch.rbln.synchronize()
    mine = rds.Chunk(size=MIB, device=0)
    for _ in range(2):  # what the killed process held is free again
        other = rbln_sim_fork(
            HOLD,
            RBLN_SIM_RDS_FILE=os.environ["RBLN_SIM_RDS_FILE"],
            RBLN_SIM_RDS_GIB=os.environ["RBLN_SIM_RDS_GIB"],
        )
        assert other.returncode == -9, other.stderr
        early, place = other.stdout.splitlines()
        assert "unknown chunk_id" in early
        assert int(place) == MIB
    mine.close()
