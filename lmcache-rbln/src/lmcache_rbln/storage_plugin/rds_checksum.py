# SPDX-License-Identifier: Apache-2.0
"""Checksums of device memory.

The NPU computes no checksum, so the bytes are copied to the host for it, in tiles that
stay in cache: the copy of one tile runs while the one before is hashed. They are not
the copy that goes to the NVMe. The cost is one D2H pass over the link and XXH3 on one
core, both while the NVMe is busy with the same chunk (writes) or the next (reads).
"""

# Standard
import threading

# Third Party
import torch
import xxhash

# Local
from ..device_streams import Copies, InFlightError, streams_of

TILE_BYTES = 2 << 20
#: Threads that hash at the same time; more would wait for the link anyway.
MAX_HASHERS = 3

_Tiles = list[torch.Tensor]


class DeviceChecksum:
    """Computes checksums of device tensors; any number of threads may call.

    Args:
        device: Where the tensors are.
        tile_bytes: Bytes of one host buffer.
    """

    def __init__(self, device: torch.device, tile_bytes: int = TILE_BYTES) -> None:
        self._streams = streams_of(device)
        self._tile_bytes = tile_bytes
        self._free: list[_Tiles] = []
        # Tiles that a copy may still write to: held for ever, so that nobody gets
        # their memory.
        self._lost: list[_Tiles] = []
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_HASHERS)

    # Callers may be in it or not, and tiles that were made in it are used by others.
    @torch.inference_mode()
    def digest(self, tensor: torch.Tensor, nbytes: int) -> bytes:
        """Return XXH3-128 of the first bytes of a tensor.

        Args:
            tensor: Flat uint8 tensor on the device; what changes it must be done.
            nbytes: How many bytes of it.

        Raises:
            RuntimeError: The device failed.
            InFlightError: It failed, and copies of the tensor may be under way.
        """
        with self._slots:
            with self._lock:
                tiles = self._free.pop() if self._free else None
            if tiles is None:
                tiles = [
                    torch.empty(self._tile_bytes, dtype=torch.uint8, pin_memory=True)
                    for _ in range(2)
                ]
            free = self._lost
            try:
                with self._streams.transfer() as copies:
                    digest = _digest(tensor[:nbytes], tiles, copies)
                free = self._free
                return digest
            except InFlightError:
                raise
            except RuntimeError:
                free = self._free
                raise
            finally:
                with self._lock:
                    free.append(tiles)


def _digest(tensor: torch.Tensor, tiles: _Tiles, copies: Copies) -> bytes:
    """Hash a tensor through two tiles."""
    state = xxhash.xxh3_128()
    parts = tensor.split(tiles[0].numel())
    copied = [_fetch(tiles[0], parts[0], copies)] if parts else []
    for number, part in enumerate(parts):
        if number + 1 < len(parts):
            copied.append(_fetch(tiles[(number + 1) % 2], parts[number + 1], copies))
        copied[number].synchronize()
        state.update(tiles[number % 2][: part.numel()].numpy().data)
    return state.digest()


def _fetch(tile: torch.Tensor, part: torch.Tensor, copies: Copies) -> torch.Event:
    return copies.copy(tile[: part.numel()], part)
