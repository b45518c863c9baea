# SPDX-License-Identifier: Apache-2.0
"""Checksums of device memory.

The NPU computes no checksum, so the bytes are copied to the host for it, in tiles that
stay in cache: the copy of one tile runs while the one before is hashed. They are not
the copy that goes to the NVMe. The cost is one D2H pass over the link and XXH3 on one
core, both while the NVMe is busy with the same chunk (writes) or the next (reads).
"""

# Standard
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
import threading

# Third Party
import torch
import xxhash

TILE_BYTES = 2 << 20
#: Threads that hash at the same time; more would wait for the link anyway.
MAX_HASHERS = 3


class DeviceChecksum:
    """Computes checksums of device tensors; any number of threads may call.

    Args:
        device: Where the tensors are.
        tile_bytes: Bytes of one host buffer.
    """

    def __init__(self, device: torch.device, tile_bytes: int = TILE_BYTES) -> None:
        self._device = device
        self._tile_bytes = tile_bytes
        self._free: list[_Hasher] = []
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_HASHERS)

    def digest(self, tensor: torch.Tensor, nbytes: int) -> bytes:
        """Return XXH3-128 of the first bytes of a tensor.

        Args:
            tensor: Flat uint8 tensor on the device; what changes it must be done.
            nbytes: How many bytes of it.

        Raises:
            RuntimeError: The device failed.
        """
        with self._hasher() as hasher:
            return hasher.digest(tensor[:nbytes])

    @contextmanager
    def _hasher(self) -> Iterator["_Hasher"]:
        with self._slots:
            with self._lock:
                hasher = self._free.pop() if self._free else None
            if hasher is None:
                hasher = _Hasher(self._device, self._tile_bytes)
            try:
                yield hasher
            except BaseException:
                # A copy into its tiles may still be under way: never use them again.
                raise
            else:
                with self._lock:
                    self._free.append(hasher)


class _Hasher:
    """Two host tiles and the stream that fills them; one thread at a time."""

    def __init__(self, device: torch.device, tile_bytes: int) -> None:
        self._tile_bytes = tile_bytes
        streams = hasattr(torch.rbln, "Stream") and hasattr(torch.rbln, "Event")
        self._stream = torch.rbln.Stream(device=device) if streams else None
        self._tiles = [
            torch.empty(tile_bytes, dtype=torch.uint8, pin_memory=streams)
            for _ in range(2 if streams else 1)
        ]

    def digest(self, tensor: torch.Tensor) -> bytes:
        state = xxhash.xxh3_128()
        parts = tensor.split(self._tile_bytes)
        if self._stream is None:
            for part in parts:
                tile = self._tiles[0][: part.numel()]
                tile.copy_(part)
                state.update(tile.numpy().data)
            return state.digest()
        done = [self._fetch(0, parts[0])] if parts else []
        for number, part in enumerate(parts):
            if number + 1 < len(parts):
                done.append(self._fetch(number + 1, parts[number + 1]))
            done[number].synchronize()
            state.update(self._tiles[number % 2][: part.numel()].numpy().data)
        return state.digest()

    def _fetch(self, number: int, part: torch.Tensor) -> Any:
        event = torch.rbln.Event()
        with torch.rbln.stream(self._stream):
            tile = self._tiles[number % 2][: part.numel()]
            tile.copy_(part, non_blocking=True)
            event.record(self._stream)
        return event
