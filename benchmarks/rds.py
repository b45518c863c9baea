# SPDX-License-Identifier: Apache-2.0
"""Direct storage against raw O_DIRECT on the same file, in the same run.

``python -m benchmarks.rds`` stores and restores chunks of 1,024 tokens of Qwen3-1.7B
(117 MB each) through the backend, header and checksum included, and writes and reads as
many bytes with plain ``pwritev`` and ``preadv``, from and to the same memory. Rounds of
the four alternate, so that a disk that changes its mind hits all. It runs on the
simulated storage, where both reach the same file; the first round only makes the file.

A store is timed from staging memory to the NVMe, one chunk per call. What it costs the
engine's thread besides is the third figure: taking staging memory, gathering into it,
the NPU's work, which is done on the host's cores here, and handing the chunk over.
"""

# Future
from __future__ import annotations

# Standard
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
import argparse
import ctypes
import os
import statistics
import sys
import tempfile
import time

# First Party
from benchmarks import _runtime
from benchmarks._report import table

if TYPE_CHECKING:
    # Third Party
    import torch

MODEL = "Qwen3-1.7B"
LAYERS, HEADS, HEAD_SIZE, TOKENS = 28, 8, 128, 1024
CHUNK_BYTES = 2 * LAYERS * HEADS * HEAD_SIZE * TOKENS * 2


def host_view(tensor: torch.Tensor) -> memoryview:
    """Return the simulated NPU's own bytes of a device tensor.

    How fast the disk is depends on how a buffer's pages lie in memory, so plain
    transfers must use the very buffers that the backend uses.
    """
    # Third Party
    from rebel import _device

    address = _device.device_bytes(tensor.data_ptr(), tensor.numel())
    return memoryview((ctypes.c_ubyte * tensor.numel()).from_address(address)).cast("B")


def measure(rounds: int, count: int) -> str:
    """Run the benchmark in this process.

    Args:
        rounds: Rounds that count.
        count: Chunks per round.

    Returns:
        Tables of GB/s with ratios, and of the engine thread's time.
    """
    # Third Party
    import torch

    # First Party
    from benchmarks._session import on_device
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache_rbln.paged_kv import RBLNPagedKVConnector
    from lmcache_rbln.storage_plugin.rds_backend import RDSBackend
    from rebel import rds

    dtype, shape = torch.bfloat16, (count, 2, HEADS, 1, TOKENS, HEAD_SIZE)
    layers = [on_device(shape, dtype) for _ in range(LAYERS)]
    for layer in layers:
        layer.copy_(torch.randn(shape[1:], dtype=dtype).expand(shape))
    kv_shape = (LAYERS, 2, TOKENS, HEADS, HEAD_SIZE)
    metadata = LMCacheMetadata(
        MODEL, 1, 1, 0, 0, dtype, kv_shape, role="worker", chunk_size=TOKENS
    )
    connector = RBLNPagedKVConnector(metadata)
    settings = {
        "rds_buffer_size": (count + 1) * (CHUNK_BYTES + 4096) // 2**20 + 1,
        "rds_max_chunks": count,
        "rds_failure_policy": "raise",
    }
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=TOKENS, local_cpu=False, max_local_cpu_size=0, extra_config=settings
    )
    backend = RDSBackend(config, metadata, dst_device="rbln:0")
    part = rds.Chunk(size=count * CHUNK_BYTES, device=0)
    path, offset = part.sim_location
    file = os.open(path, os.O_RDWR | os.O_DIRECT)
    buffers = [host_view(slot.payload) for slot in [*backend._allocator._free][:count]]
    on_engine: list[float] = []

    def gathered() -> list[Any]:
        objs = []
        for slots in torch.arange(count * TOKENS).split(TOKENS):
            start = time.perf_counter()
            obj = backend.allocate(metadata.get_shapes(), metadata.get_dtypes(), None)
            assert obj is not None
            connector.from_gpu(obj, 0, TOKENS, kvcaches=layers, slot_mapping=slots)
            on_engine.append(time.perf_counter() - start)
            objs.append(obj)
        torch.rbln.synchronize()  # type: ignore[attr-defined]
        return objs

    def store(keys: list[Any], objs: list[Any]) -> None:
        futures: list[Any] = []
        for number, (key, obj) in enumerate(zip(keys, objs, strict=True)):
            start = time.perf_counter()
            futures += backend.batched_submit_put_task([key], [obj]) or []
            obj.ref_count_down()
            on_engine[number - count] += time.perf_counter() - start
        for future in futures:
            future.result()

    def restore(keys: list[Any]) -> None:
        for obj in backend.batched_get_blocking(keys):
            assert obj is not None
            obj.ref_count_down()

    def plain(call: Callable[..., int]) -> None:
        for number, buffer in enumerate(buffers):
            done, place = 0, offset + number * CHUNK_BYTES
            while done < CHUNK_BYTES:
                done += call(file, [buffer[done:]], place + done)

    seconds: dict[str, list[float]] = defaultdict(list)
    for turn in range(rounds + 1):
        hashes = range(turn * count, (turn + 1) * count)
        keys = [CacheEngineKey(MODEL, 1, 0, number, dtype) for number in hashes]
        steps: list[tuple[Any, ...]] = [
            ("store", store, keys, gathered()),
            ("raw write", plain, os.pwritev),
            ("restore", restore, keys),
            ("raw read", plain, os.preadv),
        ]
        if turn % 2:  # who is first does not always pay for it
            steps = [steps[1], steps[0], steps[3], steps[2]]
        for name, step, *arguments in steps:
            start = time.perf_counter()
            step(*arguments)
            seconds[name].append(time.perf_counter() - start)
    backend.close()
    part.close()
    total = count * CHUNK_BYTES / 1e9
    lines = []
    for ours, direct in (("store", "raw write"), ("restore", "raw read")):
        took, wanted = (statistics.median(seconds[x][1:]) for x in (ours, direct))
        figures = (total / took, total / wanted, wanted / took)
        lines.append([ours, *(f"{figure:.2f}" for figure in figures)])
    rates = table(["", "GB/s", "O_DIRECT GB/s", "ratio"], lines)
    times = [1e3 * took for took in on_engine[count:]]
    cells = [f"{statistics.median(times):.2f}", f"{max(times):.2f}"]
    engine = table(["engine's thread per store, ms", "worst"], [cells])
    title = f"{count} chunks of {CHUNK_BYTES / 1e6:.0f} MB, medians of {rounds} rounds"
    return f"{title}\n\n{rates}\n\n{engine}"


def main() -> int:
    """Run the benchmark on simulated storage and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6, help="rounds that count")
    parser.add_argument("--chunks", type=int, default=6, help="chunks per round")
    parser.add_argument(
        "--folder", type=Path, help="where the file lies; a temporary folder by default"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="rds-") as folder:
        os.environ["RBLN_SIM_STATE_DIR"] = folder
        _runtime.use("sim")
        print(measure(options.rounds, options.chunks))
    sys.stdout.flush()
    # The simulator says of every tensor alive at exit that it leaks.
    os._exit(0)


if __name__ == "__main__":
    main()
