# SPDX-License-Identifier: Apache-2.0
"""A storage of a test's own and backends on it, for ``lmcache-rbln/tests``."""

# Standard
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
import importlib.util
import random
import threading

# Third Party
from kv_reference import Case
import pytest
import torch

# First Party
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache_rbln.storage_plugin.rds_backend import RDSBackend
from lmcache_rbln.paged_kv import RBLNPagedKVConnector
from lmcache_rbln.storage_plugin.rds.device import RDSDevice, Region
from lmcache_rbln.storage_plugin.rds.staging import StagedMemoryObj, StagingAllocator

MIB = 1 << 20
# 2 planes x 2 layers x 128 tokens x 2 heads x 64 x 2 bytes = 128 KiB.
CHUNK_BYTES = 128 << 10
REGION_BYTES = CHUNK_BYTES + 4096


#: Changes the bytes of a region.
Change = Callable[[bytearray], None]


@dataclass
class Storage:
    """Makes the simulated NVMe of a test, and damages what is on it."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def use(self, chunks: float = 1000, faults: str = "") -> None:
        """Set the size, in chunks of the test model, and the faults."""
        gib = chunks * REGION_BYTES / 2**30
        self.monkeypatch.setenv("RBLN_SIM_RDS_FILE", str(self.file))
        self.monkeypatch.setenv("RBLN_SIM_RDS_GIB", repr(gib))
        self.monkeypatch.setenv("RBLN_SIM_RDS_FAULTS", faults)
        forget_settings()

    @property
    def file(self) -> Path:
        """The file that is the NVMe."""
        return self.folder / "nvme.img"


def forget_settings() -> None:
    """Let the simulated storage read its settings again."""
    importlib.import_module("rebel.rds._settings").settings.cache_clear()
    importlib.import_module("rebel.rds._service")._service_of.cache_clear()


@contextmanager
def own_storage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    """A storage of the test's own on the simulator; the real one on an NPU."""
    made = Storage(folder, monkeypatch)
    simulated = importlib.util.find_spec("rebel._device") is not None
    if simulated:
        made.use()
    yield made
    if simulated:
        forget_settings()


def metadata_of(**changes: Any) -> LMCacheMetadata:
    """Metadata of a small model."""
    return LMCacheMetadata(
        **{
            "model_name": "m",
            "world_size": 1,
            "local_world_size": 1,
            "worker_id": 0,
            "local_worker_id": 0,
            "kv_dtype": torch.bfloat16,
            "kv_shape": (2, 2, 128, 2, 64),
            "role": "worker",
            "chunk_size": 128,
            **changes,
        }
    )


def config_of(extra: dict[str, Any] | None = None, **changes: Any) -> Any:
    """LMCache's configuration as the documentation of direct storage has it."""
    return LMCacheEngineConfig.from_defaults(
        **{
            "chunk_size": 128,
            "local_cpu": False,
            "max_local_cpu_size": 0,
            "use_layerwise": False,
            "extra_config": {"rds_buffer_size": 2} | (extra or {}),
            **changes,
        }
    )


def key_of(number: int, worker: int = 0) -> CacheEngineKey:
    """A key."""
    return CacheEngineKey("m", 1, worker, number, torch.bfloat16)


def content_of(number: int) -> bytes:
    """The bytes of a chunk, different in every element and chunk."""
    return random.Random(number).randbytes(CHUNK_BYTES)


class Engine:
    """What LMCache does with a backend."""

    def __init__(self, backend: RDSBackend) -> None:
        self.backend = backend
        self.metadata = backend.metadata

    def chunk(self, number: int) -> StagedMemoryObj:
        """A chunk in staging memory."""
        obj = self.backend.allocate(
            self.metadata.get_shapes(), self.metadata.get_dtypes(), None
        )
        assert isinstance(obj, StagedMemoryObj)
        data = torch.frombuffer(bytearray(content_of(number)), dtype=torch.uint8)
        obj.slot.payload.copy_(data)
        return obj

    def submit(self, *numbers: int) -> Any:
        """Store chunks as LMCache's storage manager does; returns the futures."""
        objs = [self.chunk(number) for number in numbers]
        keys = [key_of(number) for number in numbers]
        try:
            return self.backend.batched_submit_put_task(keys, list(objs))
        finally:
            for obj in objs:
                obj.ref_count_down()

    def store(self, *numbers: int) -> None:
        """Store chunks and wait until they are down, or have failed."""
        for future in self.submit(*numbers) or []:
            future.result(timeout=10)

    def hold_writes(self, until: threading.Event) -> None:
        """Let the thread that writes do nothing before an event."""
        writer = self.backend._store._writer
        assert writer is not None
        writer.submit(until.wait)

    def wait_for_writes(self) -> None:
        """Wait for all that was handed to the thread that writes, if there is one."""
        writer = self.backend._store._writer
        if writer is not None:
            writer.submit(lambda: None).result(timeout=60)

    def region(self, number: int) -> Region:
        """Where a chunk is on the NVMe."""
        return self.backend._store.index._entries[key_of(number)].region

    def load(self, *numbers: int) -> list[bool]:
        """Restore chunks; returns which came back, with exactly their bytes."""
        objs = self.backend.batched_get_blocking([key_of(n) for n in numbers])
        assert len(objs) == len(numbers)
        came = []
        for number, obj in zip(numbers, objs, strict=True):
            came.append(obj is not None)
            if obj is not None:
                assert isinstance(obj, StagedMemoryObj)
                assert obj.get_ref_count() == 1
                assert obj.get_shapes() == self.metadata.get_shapes()
                data = obj.slot.payload.cpu().numpy().tobytes()
                assert data == content_of(number), f"wrong bytes in chunk {number}"
                obj.ref_count_down()
        return came

    def holds(self, *numbers: int) -> list[bool]:
        """Which chunks a lookup finds."""
        return [self.backend.contains(key_of(number)) for number in numbers]

    def metric(self, name: str) -> float:
        """Value of a counter or gauge."""
        return float(self.backend._metrics[name]._value.get())

    def assert_idle(self) -> None:
        """Nothing holds staging memory, and every slot is accounted for."""
        allocator = self.backend._allocator
        assert allocator.memcheck()
        assert allocator.free_slots == allocator.num_slots


def paged_kv_of(case: Case, chunk_tokens: int) -> RBLNPagedKVConnector:
    """A connector to a paged cache."""
    shape = (case.num_layers, case.planes, chunk_tokens, case.heads, case.head_size)
    metadata = metadata_of(
        kv_dtype=case.dtype,
        kv_shape=shape,
        use_mla=case.layout == "mla",
        chunk_size=chunk_tokens,
    )
    return RBLNPagedKVConnector(metadata)


def device_chunks(chunk_bytes: int) -> StagingAllocator:
    """1 MiB of staging memory."""
    device = RDSDevice(torch.device("rbln:0"), numa_node=0)
    return StagingAllocator(device, MIB, chunk_bytes)


def staged(allocator: StagingAllocator, case: Case) -> StagedMemoryObj:
    """A chunk in staging memory, of any shape."""
    obj = allocator.allocate(torch.Size([2, 1, 4, 4]), case.dtype)
    assert obj is not None
    return obj


MakeEngine = Callable[..., Engine]


@contextmanager
def engines() -> Iterator[MakeEngine]:
    """Makes engines on the test's storage from ``rds_*`` settings."""
    made: list[Engine] = []

    def make(extra: dict[str, Any] | None = None, metadata: Any = None) -> Engine:
        metadata = metadata or metadata_of()
        backend = RDSBackend(config_of(extra), metadata, None, None, "rbln:0")
        made.append(Engine(backend))
        return made[-1]

    yield make
    for one in made:
        one.backend.close()


def damage(engine: Engine, number: int, change: Change) -> None:
    """Change the stored bytes of a chunk behind the backend's back.

    Args:
        engine: Has stored it.
        number: Of the chunk.
        change: Changes the region's bytes, its header first.
    """
    path, start = engine.region(number).chunk.sim_location
    with open(path, "r+b") as file:
        file.seek(start)
        data = bytearray(file.read(REGION_BYTES))
        change(data)
        assert len(data) == REGION_BYTES
        file.seek(start)
        file.write(data)


def _overwrite(first: int, last: int, value: int = 0) -> Change:
    def change(data: bytearray) -> None:
        data[first:last] = bytes([value]) * (last - first)

    return change


def put(place: slice, value: bytes) -> Change:
    """A change that puts bytes in a place of the region."""

    def change(data: bytearray) -> None:
        data[place] = value

    return change


def _flip(bit: int) -> Change:
    def change(data: bytearray) -> None:
        data[bit // 8] ^= 1 << bit % 8

    return change


#: Kinds of damage to a region.
DAMAGE = {
    "all zero": _overwrite(0, REGION_BYTES),
    "header zero": _overwrite(0, 4096),
    "payload zero": _overwrite(4096, REGION_BYTES),
    "second half missing": _overwrite(REGION_BYTES // 2, REGION_BYTES),
    "last sector missing": _overwrite(REGION_BYTES - 4096, REGION_BYTES),
    "poison": _overwrite(0, REGION_BYTES, 0xA5),
    **{
        f"bit {bit}": _flip(bit)
        for bit in (
            0,
            8 * 4096 - 1,
            8 * 4096,
            8 * REGION_BYTES - 1,
            *random.Random(0).sample(range(8 * REGION_BYTES), 12),
        )
    },
}
