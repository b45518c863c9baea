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

LAYERS, HEADS, HEAD_SIZE, TOKENS = 28, 8, 128, 1024
CHUNK_BYTES = 2 * LAYERS * HEADS * HEAD_SIZE * TOKENS * 2


def timed(step: Callable[..., object], *arguments: object) -> float:
    """Run a step and return its seconds."""
    start = time.perf_counter()
    step(*arguments)
    return time.perf_counter() - start


def host_view(tensor: torch.Tensor) -> memoryview:
    """Return the simulated NPU's own bytes of a device tensor.

    How fast the disk is depends on how a buffer's pages lie in memory, so plain
    transfers must use the very buffers that the backend uses.
    """
    # Third Party
    from rebel import _device

    address = _device.device_bytes(tensor.data_ptr(), tensor.numel())
    return memoryview((ctypes.c_ubyte * tensor.numel()).from_address(address)).cast("B")


class Stored:
    """A paged cache, the backend that stores its blocks, and a file beside it.

    Args:
        count: Chunks per round.
    """

    def __init__(self, count: int) -> None:
        # Third Party
        import torch

        # First Party
        from benchmarks._session import on_device
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache_rbln.paged_kv import RBLNPagedKVConnector
        from lmcache_rbln.paged_kv_device import DeviceBlockTransfer
        from lmcache_rbln.storage_plugin.rds_backend import RDSBackend
        from rebel import rds

        self._count, self._dtype = count, torch.bfloat16
        shape = (count, 2, HEADS, 1, TOKENS, HEAD_SIZE)
        self._layers = [on_device(shape, self._dtype) for _ in range(LAYERS)]
        for layer in self._layers:
            layer.copy_(torch.randn(shape[1:], dtype=self._dtype).expand(shape))
        self._metadata = LMCacheMetadata(
            model_name="Qwen3-1.7B",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=self._dtype,
            kv_shape=(LAYERS, 2, TOKENS, HEADS, HEAD_SIZE),
            role="worker",
            chunk_size=TOKENS,
        )
        self._connector = RBLNPagedKVConnector(self._metadata, DeviceBlockTransfer())
        self._slots = torch.arange(count * TOKENS).split(TOKENS)
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
        self._backend = RDSBackend(config, self._metadata, dst_device="rbln:0")
        self._part = rds.Chunk(size=count * CHUNK_BYTES, device=0)
        path, self._offset = self._part.sim_location
        self._file = os.open(path, os.O_RDWR | os.O_DIRECT)
        staging = list(self._backend._allocator._free)[:count]
        self._buffers = [host_view(slot.payload) for slot in staging]
        #: Seconds of the engine's thread.
        self.gathering: list[float] = []
        self.handing: list[float] = []

    def gather(self) -> list[Any]:
        """Take staging memory and gather a chunk into each."""
        # Third Party
        import torch

        shapes, dtypes = self._metadata.get_shapes(), self._metadata.get_dtypes()
        objs = []
        for slots in self._slots:
            start = time.perf_counter()
            obj = self._backend.allocate(shapes, dtypes, None)
            self._connector.from_gpu(
                obj, 0, TOKENS, kvcaches=self._layers, slot_mapping=slots
            )
            self.gathering.append(time.perf_counter() - start)
            objs.append(obj)
        torch.rbln.synchronize()  # type: ignore[attr-defined]
        return objs

    def _keys(self, number: int) -> list[Any]:
        # First Party
        from lmcache.utils import CacheEngineKey

        hashes = range(number * self._count, (number + 1) * self._count)
        return [CacheEngineKey("Qwen3-1.7B", 1, 0, h, self._dtype) for h in hashes]

    def store(self, number: int, objs: list[Any]) -> None:
        """Store a round's chunks and wait for them."""
        futures = []
        for key, obj in zip(self._keys(number), objs, strict=True):
            start = time.perf_counter()
            futures += self._backend.batched_submit_put_task([key], [obj]) or []
            obj.ref_count_down()
            self.handing.append(time.perf_counter() - start)
        for future in futures:
            future.result()

    def restore(self, number: int) -> None:
        """Restore a round's chunks."""
        for obj in self._backend.batched_get_blocking(self._keys(number)):
            assert obj is not None
            obj.ref_count_down()

    def plain(self, call: Callable[..., int]) -> None:
        """Write or read as many bytes without the backend."""
        for number, buffer in enumerate(self._buffers):
            done, place = 0, self._offset + number * CHUNK_BYTES
            while done < CHUNK_BYTES:
                done += call(self._file, [buffer[done:]], place + done)

    def close(self) -> None:
        """Give the storage back."""
        self._backend.close()
        self._part.close()


def measure(rounds: int, count: int) -> str:
    """Run the benchmark in this process.

    Args:
        rounds: Rounds that count.
        count: Chunks per round.

    Returns:
        Tables of GB/s with ratios, and of the engine thread's time.
    """
    stored = Stored(count)
    seconds: dict[str, list[float]] = {
        name: [] for name in ("store", "raw write", "restore", "raw read")
    }
    for number in range(rounds + 1):
        objs = stored.gather()
        steps: list[tuple[Any, ...]] = [
            ("store", stored.store, number, objs),
            ("raw write", stored.plain, os.pwritev),
            ("restore", stored.restore, number),
            ("raw read", stored.plain, os.preadv),
        ]
        if number % 2:  # who is first does not always pay for it
            steps = [steps[1], steps[0], steps[3], steps[2]]
        for name, *step in steps:
            seconds[name].append(timed(*step))
    stored.close()
    total = count * CHUNK_BYTES / 1e9
    rates = {name: total / statistics.median(s[1:]) for name, s in seconds.items()}
    lines = [
        [
            ours,
            f"{rates[ours]:.2f}",
            f"{rates[plain]:.2f}",
            f"{rates[ours] / rates[plain]:.2f}",
            f"{total / max(seconds[ours][1:]):.2f}",
            f"{total / max(seconds[plain][1:]):.2f}",
        ]
        for ours, plain in (("store", "raw write"), ("restore", "raw read"))
    ]
    header = ["", "GB/s", "O_DIRECT GB/s", "ratio", "slowest", "slowest O_DIRECT"]
    pairs = zip(stored.gathering[count:], stored.handing[count:], strict=True)
    engine = [1e3 * (gathering + handing) for gathering, handing in pairs]
    times = [f"{statistics.median(engine):.2f}", f"{max(engine):.2f}"]
    on_engine = table(["engine's thread per store, ms", "worst"], [times])
    title = f"{count} chunks of {CHUNK_BYTES / 1e6:.0f} MB, medians of {rounds} rounds"
    return f"{title}\n\n{table(header, lines)}\n\n{on_engine}"


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
