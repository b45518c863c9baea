# SPDX-License-Identifier: Apache-2.0
"""Regions on the storage, and transfers between them and device memory."""

import ctypes
import errno
import functools
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType

from .. import _device
from .._C.vmem import Buffer
from ._service import service
from ._settings import UNIT

_POISON = 0xA5


@functools.cache
def _pool(pid: int) -> ThreadPoolExecutor:
    # By process: a forked child has none of its parent's threads.
    return ThreadPoolExecutor(8, thread_name_prefix="rbln-sim-rds")


@functools.cache
def _array_type(nbytes: int) -> type[ctypes.Array]:
    return ctypes.c_ubyte * nbytes


class Stream:
    """Queue of transfers; leaving the ``with`` block waits for all of them.

    Transfers of one stream run at the same time and in any order. In deferred mode they
    run in the calling thread, where the schedule says so, and what is read into holds
    poison until then.

    Args:
        device: torch device index.
        node_id: NUMA node of the threads; not simulated.
    """

    def __init__(self, device: int = 0, node_id: int = 0) -> None:
        self.device = device
        self.node_id = node_id
        self._pending: list[Future[None]] | None = None
        # Deferred mode: those that have not run.
        self._queued: list[tuple[_Transfer, Future[None]]] = []

    def __enter__(self) -> "Stream":
        self._pending = []
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pending, self._pending = self._pending or [], None
        self._run_queued(waited_for=True)
        wait(pending)
        if error is None:
            for transfer in pending:
                transfer.result()

    def submit(self, transfer: "_Transfer") -> None:
        """Queue a transfer; for :class:`Chunk`."""
        if self._pending is None:
            raise RuntimeError("rds: the stream is used outside of its 'with' block")
        if service().order is None:
            self._pending.append(_pool(os.getpid()).submit(transfer.run))
            return
        future: Future[None] = Future()
        try:
            transfer.poison()
        except RuntimeError as error:
            future.set_exception(error)
        else:
            self._queued.append((transfer, future))
        self._pending.append(future)
        self._run_queued(waited_for=False)

    def _run_queued(self, waited_for: bool) -> None:
        order = service().order
        if order is None:
            return
        for transfer, future in order.take(self._queued, waited_for):
            try:
                transfer.run()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)


class Chunk:
    """A flat region on the storage.

    Args:
        size: In bytes, a multiple of 4096.
        device: torch device index; it must be open, which a first tensor on it does.

    Raises:
        ValueError: The size is not a positive multiple of 4096.
        RuntimeError: There is no storage service, or the device is not open.
        OSError: ``ENOSPC`` when the storage is full.
    """

    def __init__(self, size: int, device: int = 0) -> None:
        if size <= 0 or size % UNIT:
            raise ValueError(f"rds: size={size} is not a positive multiple of {UNIT}")
        if not service().capacity:
            raise RuntimeError("rds: no storage service (RBLN_SIM_RDS_GIB=0)")
        if not _device.is_open(device):
            raise RuntimeError(
                f"rds: unknown chunk_id: rbln:{device} is not open in this process; "
                "make one tensor there first"
            )
        self.size = size
        self.device = device
        self._service = service()
        self._region = self._service.allocate(size)
        self._closed = False

    @property
    def chunk_id(self) -> int:
        """Number of the region."""
        return self._region.number

    @property
    def sim_location(self) -> tuple[str, int]:
        """Where a test finds the region: path of the file, offset in bytes."""
        return str(self._service.path), self._region.offset

    def write(
        self, buf: Buffer, file_offset: int = 0, stream: Stream | None = None
    ) -> None:
        """Write a whole buffer.

        Args:
            buf: The buffer; see ``rebel._C.vmem``.
            file_offset: Where in the region, a multiple of 4096.
            stream: Queue it there, else return when it is done.

        Raises:
            ValueError: Sizes or offset do not fit.
            RuntimeError: The region was closed, or the device is lost.
            OSError: The storage failed.
        """
        self._transfer("write", buf, file_offset, stream)

    def read(
        self, buf: Buffer, file_offset: int = 0, stream: Stream | None = None
    ) -> None:
        """Read a whole buffer; arguments and errors as for :meth:`write`."""
        self._transfer("read", buf, file_offset, stream)

    def _transfer(
        self, kind: str, buf: Buffer, file_offset: int, stream: Stream | None
    ) -> None:
        if self._closed:
            raise RuntimeError("rds: the chunk is closed")
        self._service.check(file_offset, buf.size)
        if file_offset + buf.size > self.size:
            raise ValueError(
                f"rds: {buf.size} bytes at {file_offset} do not fit a chunk of "
                f"{self.size}"
            )
        transfer = _Transfer(self, kind, buf, self._region.offset + file_offset)
        if stream is None:
            transfer.run()
            _device.set_host_view_known(buf.vaddr, True)
        else:
            stream.submit(transfer)

    def close(self) -> None:
        """Give the region back; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._service.release(self._region)


class _Transfer:
    def __init__(self, chunk: Chunk, kind: str, buf: Buffer, offset: int) -> None:
        self._service = chunk._service
        self._kind = kind
        self._buffer = buf
        self._offset = offset

    def poison(self) -> None:
        """Fill the device memory that it is going to fill."""
        if self._kind != "read":
            return
        address = _device.device_bytes(self._buffer.vaddr, self._buffer.size)
        _device.set_host_view_known(self._buffer.vaddr, False)
        ctypes.memset(address, _POISON, self._buffer.size)

    def run(self) -> None:
        address = _device.device_bytes(self._buffer.vaddr, self._buffer.size)
        array = _array_type(self._buffer.size).from_address(address)
        memory = memoryview(array).cast("B")
        reads = self._kind == "read"
        if reads:
            _device.set_host_view_known(self._buffer.vaddr, False)
        torn = self._service.faults.begin(self._kind) == "torn"
        length = self._buffer.size // 2 // UNIT * UNIT if torn else self._buffer.size
        if address % UNIT:
            self._by_bounce(memory[:length], reads)
        else:
            self._move(memory[:length], reads)

    def _by_bounce(self, memory: memoryview, reads: bool) -> None:
        # Small device memory is not page-aligned in the simulator's own memory.
        if not memory:
            return
        with mmap.mmap(-1, len(memory)) as bounce, memoryview(bounce) as view:
            if not reads:
                view[:] = memory
            self._move(view, reads)
            if reads:
                memory[:] = view

    def _move(self, memory: memoryview, reads: bool) -> None:
        fd = self._service.fd()
        done = 0
        while done < len(memory):
            part = memory[done:]
            at = self._offset + done
            moved = os.preadv(fd, [part], at) if reads else os.pwritev(fd, [part], at)
            if moved == 0:
                raise OSError(errno.EIO, f"rds: the device ends at {at}")
            done += moved
