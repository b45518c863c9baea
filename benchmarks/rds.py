# SPDX-License-Identifier: Apache-2.0
"""Direct storage against raw O_DIRECT on the same file, in the same run.

``python -m benchmarks.rds`` stores and restores chunks of 1,024 tokens of Qwen3-1.7B
(28 layers, 8 KV heads of 128, bfloat16: 117 MB each) through the backend, header and
checksum included, and writes and reads as many bytes with plain ``pwritev`` and
``preadv``, from and to the same memory. Rounds of the four alternate, so that a disk
that changes its mind hits all. It runs on the simulated storage, where both reach
the same file; the first round only makes the file.

A store is timed from staging memory to the NVMe, one chunk per call. What it costs the
engine's thread besides is the third figure: taking staging memory, gathering into it,
the NPU's work, which is done on the host's cores here, and handing the chunk over.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
import argparse
import ctypes
import json
import os
import statistics
import sys
import tempfile
import time

if TYPE_CHECKING:
    # Third Party
    import torch

LAYERS, HEADS, HEAD_SIZE, TOKENS = 28, 8, 128, 1024
CHUNK_BYTES = 2 * LAYERS * HEADS * HEAD_SIZE * TOKENS * 2


def timed(step: Callable[[], object]) -> float:
    """Run a step and return its seconds."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


class Raw:
    """Plain O_DIRECT transfers on a part of the storage's file.

    Args:
        path: The file.
        offset: Where the part begins.
        buffers: A page-aligned buffer of a chunk's size for each chunk.
    """

    def __init__(self, path: str, offset: int, buffers: list[memoryview]) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        self._chunks = [
            (buffer, offset + number * CHUNK_BYTES)
            for number, buffer in enumerate(buffers)
        ]

    def write(self) -> None:
        """Write all chunks."""
        for buffer, place in self._chunks:
            self._move(os.pwritev, buffer, place)

    def read(self) -> None:
        """Read all chunks."""
        for buffer, place in self._chunks:
            self._move(os.preadv, buffer, place)

    def _move(self, call: Callable[..., int], buffer: memoryview, place: int) -> None:
        done = 0
        while done < CHUNK_BYTES:
            done += call(self._fd, [buffer[done:]], place + done)


def host_view(tensor: torch.Tensor) -> memoryview:
    """Return the simulated NPU's own bytes of a device tensor.

    How fast the disk is depends on how a buffer's pages lie in memory, so plain
    transfers must use the very buffers that the backend uses.
    """
    # Third Party
    from rebel import _device

    nbytes = tensor.numel()
    address = _device.device_bytes(tensor.data_ptr(), nbytes)
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def measure(rounds: int, count: int) -> dict[str, object]:
    """Run the benchmark in this process.

    Args:
        rounds: Rounds that count.
        count: Chunks per round.

    Returns:
        Rates in GB/s, ratios, and the engine thread's milliseconds per store.
    """
    # Third Party
    import torch

    # First Party
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_management import MemoryObj
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache_rbln.paged_kv import RBLNPagedKVConnector
    from lmcache_rbln.storage_plugin.rds_backend import RDSBackend
    from rebel import rds

    layers = []
    for _ in range(LAYERS):
        shape = (count, 2, HEADS, 1, TOKENS, HEAD_SIZE)
        layer = torch.empty(shape, dtype=torch.bfloat16, device="rbln:0")
        torch.rbln.bind_device_memory(layer)  # type: ignore[attr-defined]
        layer.copy_(torch.randn(shape[1:], dtype=torch.bfloat16).expand(shape))
        layers.append(layer)
    metadata = LMCacheMetadata(
        model_name="Qwen3-1.7B",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(LAYERS, 2, TOKENS, HEADS, HEAD_SIZE),
        role="worker",
        chunk_size=TOKENS,
    )
    connector = RBLNPagedKVConnector(metadata)
    first_slots = torch.arange(TOKENS)
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=TOKENS,
        local_cpu=False,
        max_local_cpu_size=0,
        extra_config={
            "rds_buffer_size": (count + 1) * (CHUNK_BYTES + 4096) // 2**20 + 1,
            "rds_max_chunks": count,
            "rds_failure_policy": "raise",
        },
    )
    backend = RDSBackend(config, metadata, dst_device="rbln:0")
    part = rds.Chunk(size=count * CHUNK_BYTES, device=0)
    path, offset = part.sim_location
    slots = list(backend._allocator._free)[:count]
    raw = Raw(path, offset, [host_view(slot.payload) for slot in slots])
    gathering: list[float] = []
    handing: list[float] = []

    def keys(number: int) -> list[CacheEngineKey]:
        return [
            CacheEngineKey("Qwen3-1.7B", 1, 0, number * count + i, torch.bfloat16)
            for i in range(count)
        ]

    def gathered() -> list[MemoryObj]:
        objs: list[MemoryObj] = []
        for block in range(count):
            start = time.perf_counter()
            obj = backend.allocate(metadata.get_shapes(), metadata.get_dtypes(), None)
            assert obj is not None
            slots = first_slots + block * TOKENS
            connector.from_gpu(obj, 0, TOKENS, kvcaches=layers, slot_mapping=slots)
            gathering.append(time.perf_counter() - start)
            objs.append(obj)
        torch.rbln.synchronize()  # type: ignore[attr-defined]
        return objs

    def store(number: int, objs: list[MemoryObj]) -> None:
        futures = []
        for key, obj in zip(keys(number), objs, strict=True):
            start = time.perf_counter()
            futures += backend.batched_submit_put_task([key], [obj]) or []
            obj.ref_count_down()
            handing.append(time.perf_counter() - start)
        for future in futures:
            future.result()

    def restore(number: int) -> None:
        objs = backend.batched_get_blocking(keys(number))
        for obj in objs:
            assert obj is not None
            obj.ref_count_down()

    seconds: dict[str, list[float]] = {
        name: [] for name in ("store", "raw write", "restore", "raw read")
    }
    for number in range(rounds + 1):
        objs = gathered()
        steps: list[tuple[str, Callable[[], object]]] = [
            ("store", lambda n=number, o=objs: store(n, o)),  # type: ignore[misc]
            ("raw write", raw.write),
            ("restore", lambda n=number: restore(n)),  # type: ignore[misc]
            ("raw read", raw.read),
        ]
        if number % 2:  # who is first does not always pay for it
            steps = [steps[1], steps[0], steps[3], steps[2]]
        for name, step in steps:
            took = timed(step)
            if number:
                seconds[name].append(took)
        if not number:
            gathering.clear()
            handing.clear()
    backend.close()
    part.close()
    in_thread = [a + b for a, b in zip(gathering, handing, strict=True)]
    total = count * CHUNK_BYTES
    rates = {name: total / statistics.median(s) / 1e9 for name, s in seconds.items()}
    return {
        "chunks": count,
        "rounds": rounds,
        "GB/s": {name: round(rate, 3) for name, rate in rates.items()},
        "store / raw write": round(rates["store"] / rates["raw write"], 3),
        "restore / raw read": round(rates["restore"] / rates["raw read"], 3),
        "engine thread per store, ms": {
            "median": round(statistics.median(in_thread) * 1e3, 3),
            "worst": round(max(in_thread) * 1e3, 3),
        },
        "seconds": {n: [round(t, 3) for t in s] for n, s in seconds.items()},
    }


def main() -> int:
    """Run the benchmark on simulated storage and print its figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6, help="rounds that count")
    parser.add_argument("--chunks", type=int, default=6, help="chunks per round")
    parser.add_argument(
        "--folder", type=Path, help="where the file lies; a temporary folder by default"
    )
    options = parser.parse_args()
    # Third Party
    import rbln_sim

    with tempfile.TemporaryDirectory(dir=options.folder, prefix="rds-") as folder:
        os.environ["RBLN_SIM_STATE_DIR"] = folder
        os.environ.setdefault("LMCACHE_DEVICE_BACKEND", "rbln")
        rbln_sim.activate()
        print(json.dumps(measure(options.rounds, options.chunks), indent=2))
    sys.stdout.flush()
    # The simulator says of every tensor alive at exit that it leaks.
    os._exit(0)


if __name__ == "__main__":
    main()
