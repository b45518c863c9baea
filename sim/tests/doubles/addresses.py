# SPDX-License-Identifier: Apache-2.0
"""A test double that works on device addresses, as native kernels do."""

# Standard
from __future__ import annotations

from collections.abc import Callable, Sequence
import ctypes
import os

# First Party
from rbln_sim.activation import library_path
from rbln_sim.symbols import base_name, exported
from sim.tests.doubles.bugs import Bug

U64 = ctypes.c_uint64


class CallRefusedError(RuntimeError):
    """A call of the runtime failed; the reason is on stderr."""


class Runtime:
    """The C++ functions of ``librbln.so`` that torch-rbln calls."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(library_path()))
        self._mangled = {base_name(symbol): symbol for symbol in exported()}

    def malloc(self, device: int, size: int) -> int:
        """Allocate device memory and return its address."""
        address = U64()
        reference = ctypes.byref(address)
        self._call("rbln_malloc_eager", ctypes.c_uint32(device), U64(size), reference)
        return address.value

    def free(self, address: int) -> None:
        """Free what :meth:`malloc` returned."""
        self._call("rbln_free", U64(address))

    def upload(self, source: int, target: int, size: int) -> None:
        """Copy host bytes to the device."""
        self._call("rbln_memcpy_h2v", U64(source), U64(target), U64(size))

    def download(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """Copy a batch of (device address, host address, bytes) to the host."""
        # std::tuple lays its elements out from the last to the first.
        flat = [number for entry in entries for number in reversed(entry)]
        array = (U64 * len(flat))(*flat)
        begin = ctypes.addressof(array)
        end = begin + ctypes.sizeof(array)
        vector = (U64 * 3)(begin, end, end)
        self._call("rbln_memcpy_v2h_multi", ctypes.byref(vector))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, self._mangled[name])(*arguments)
        if code != 0:
            raise CallRefusedError(f"{name} returned {code}")


class AddressCache:
    """One layer of KV blocks, known by its address.

    Args:
        runtime: The runtime's functions.
        device: Number of the NPU.
        blocks: The bytes of each block, all of one length.
        bug: The mistake to make, if any.
    """

    def __init__(
        self,
        runtime: Runtime,
        device: int,
        blocks: Sequence[bytes],
        bug: Bug | None = None,
    ) -> None:
        self._runtime = runtime
        self._device = device
        self._bug = bug
        self._block_bytes = len(blocks[0])
        self._size = self._block_bytes * len(blocks)
        self._address = runtime.malloc(device, self._size)
        self._fill(blocks)

    def reallocate(self, blocks: Sequence[bytes]) -> None:
        """Move to a new allocation of the same size, as a dynamic KV cache does."""
        self._runtime.free(self._address)
        address = self._runtime.malloc(self._device, self._size)
        if self._bug is not Bug.STALE_ADDRESS:
            self._address = address
        self._fill(blocks)

    def gather(self, block_ids: Sequence[int]) -> bytes:
        """Return the bytes of some blocks, side by side."""
        size = self._block_bytes
        # A row more than there is, so that only the device's end can be passed.
        chunk = ctypes.create_string_buffer(size * (len(block_ids) + 1))
        start = ctypes.addressof(chunk)
        if self._bug is Bug.HOST_DEREFERENCE:
            return b"".join(
                ctypes.string_at(self._address + block * size, size)
                for block in block_ids
            )
        stride = size
        length = size
        if self._bug is Bug.COPY_PAST_END:
            length += 1
            stride += 1
        if self._bug is Bug.OVERLAPPING_BATCH:
            stride -= 1
        self._in_this_process(
            lambda: self._runtime.download(
                [
                    (self._address + block * size, start + place * stride, length)
                    for place, block in enumerate(block_ids)
                ]
            )
        )
        return chunk.raw[: size * len(block_ids)]

    def release(self) -> None:
        """Free the blocks."""
        self._runtime.free(self._address)
        if self._bug is Bug.DOUBLE_FREE:
            self._runtime.free(self._address)

    def last_gather(self, block_ids: Sequence[int]) -> bytes:
        """Return the bytes of some blocks and free the cache."""
        if self._bug is Bug.USE_AFTER_FREE:
            self.release()
            return self.gather(block_ids)
        gathered = self.gather(block_ids)
        self.release()
        return gathered

    def _fill(self, blocks: Sequence[bytes]) -> None:
        source = ctypes.create_string_buffer(b"".join(blocks), self._size)
        self._runtime.upload(ctypes.addressof(source), self._address, self._size)

    def _in_this_process(self, work: Callable[[], None]) -> None:
        if self._bug is not Bug.USED_AFTER_FORK:
            work()
            return
        child = os.fork()
        if child == 0:
            try:
                work()
            except CallRefusedError:
                os._exit(1)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
            raise CallRefusedError("the helper process failed")
