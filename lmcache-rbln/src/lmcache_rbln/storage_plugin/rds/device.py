# SPDX-License-Identifier: Apache-2.0
"""The thin layer over ``rebel.rds``, and the only importer of ``rebel``.

(``python -m lmcache_rbln.diagnose`` runs the documented check for devices besides, in a
process of its own.)

Rebellions publishes no documentation of the module. Everything that is assumed of it
stands here, by name, so that a difference found on hardware is one small change:

* A1  ``rds.Chunk(size=, device=)`` takes its space on the NVMe, or the first write to
  it does; a full NVMe is an error with ``errno`` ENOSPC or "no space" in its text.
* A2  Sizes and file offsets are multiples of 4096; a transfer moves a whole buffer.
* A3  ``rds.Stream(device=, node_id=)`` queues transfers, in no particular order;
  leaving its ``with`` block waits for all of them and raises if one failed.
* A4  ``vmem.sync_to_device(address)`` comes before a write.
* A5  ``rds.mark_device_updated(address)`` comes after a read on a stream.
* A6  ``vmem.get_device_buffers(address)`` gives the buffers of a tensor that covers its
  storage; several lie one after the other in the file.
* A7  A tensor must have been made on the device before the first chunk.
* A8  ``Chunk.close()`` gives the space back.
"""

# Standard
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
import errno
from typing import Any

# Third Party
import torch

# First Party
from lmcache.logging import init_logger

logger = init_logger(__name__)

ALIGNMENT = 4096


class RDSError(RuntimeError):
    """A storage operation failed."""


class RDSFullError(RDSError):
    """There is no space left on the NVMe."""


def aligned(nbytes: int) -> int:
    """Round a size up to what the storage transfers (A2)."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except RDSError:
        raise
    except Exception as error:  # the module's own types are not known
        text = f"{what} failed: {error}"
        full = getattr(error, "errno", None) == errno.ENOSPC
        if full or "no space" in str(error).lower():
            raise RDSFullError(text) from error
        raise RDSError(text) from error


@dataclass(eq=False)
class Region:
    """A piece of the NVMe.

    Attributes:
        chunk: The ``rds.Chunk``.
        sound: Whether all that was read from it is what had been written.
    """

    chunk: Any
    sound: bool = True


class Batch:
    """Transfers that run together; made by :meth:`RDSDevice.batch`.

    Offsets in regions are multiples of 4096, tensors are on the device and cover their
    storage.
    """

    def __init__(self, vmem: Any, stream: Any) -> None:
        self._vmem = vmem
        self._stream = stream
        self.read_into: list[torch.Tensor] = []

    def write(self, region: Region, offset: int, source: torch.Tensor) -> None:
        """Queue a write from a tensor, which must stay unchanged until the batch ends.

        Raises:
            RDSError: It could not be queued.
        """
        with _translated("an RDS write"):
            self._vmem.sync_to_device(source.data_ptr())  # A4
            for buffer, at in self._buffers(source, offset):
                region.chunk.write(buffer, file_offset=at, stream=self._stream)

    def read(self, region: Region, offset: int, target: torch.Tensor) -> None:
        """Queue a read into a tensor, which nobody may use until the batch ends.

        Raises:
            RDSError: It could not be queued.
        """
        with _translated("an RDS read"):
            self.read_into.append(target)
            for buffer, at in self._buffers(target, offset):
                region.chunk.read(buffer, file_offset=at, stream=self._stream)

    def _buffers(self, tensor: torch.Tensor, offset: int) -> Iterator[tuple[Any, int]]:
        for buffer in self._vmem.get_device_buffers(tensor.data_ptr()):  # A6
            yield buffer, offset
            offset += buffer.size


class RDSDevice:
    """The NVMe storage as one worker's NPU reaches it.

    Args:
        device: The worker's NPU.
        numa_node: NUMA node of the storage threads.

    Raises:
        RDSError: There is no ``rebel.rds``, or its service has no device.
    """

    def __init__(self, device: torch.device, numa_node: int) -> None:
        try:
            # Third Party
            from rebel import rds
            from rebel._C import vmem
        except ImportError as error:
            raise RDSError(
                f"direct storage needs rebel.rds of rebel-compiler ({error})"
            ) from error
        if not rds.is_available() or rds.query_available_device_count() < 1:
            raise RDSError(
                "no RDS device is available; check `systemctl status "
                "rebellions-rds-binding.service`"
            )
        self.device = device
        self._index = device.index or 0
        self._numa_node = numa_node
        self._rds = rds
        self._vmem = vmem

    def empty(self, nbytes: int) -> torch.Tensor:
        """Make device memory that covers its whole storage, bound to the NPU.

        Args:
            nbytes: A multiple of 4096.

        Raises:
            RDSError: The NPU has not that much memory left.
        """
        try:
            # Written by threads in inference mode and by others: never made in it.
            with torch.inference_mode(False):
                tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            torch.rbln.bind_device_memory(tensor)
        except RuntimeError as error:
            raise RDSError(
                f"{nbytes} bytes of staging memory on {self.device}: {error}"
            ) from error
        return tensor

    def new_region(self, nbytes: int) -> Region:
        """Take a piece of the NVMe.

        Args:
            nbytes: A multiple of 4096.

        Raises:
            RDSFullError: There is no space.
            RDSError: The storage failed.
        """
        with _translated("a new RDS chunk"):
            return Region(self._rds.Chunk(size=nbytes, device=self._index))

    def release(self, region: Region) -> None:
        """Give a piece back; a failure of a lost device is not told."""
        try:
            region.chunk.close()
        except Exception as error:
            logger.debug("RDS chunk not given back: %s", error)

    @contextmanager
    def batch(self) -> Iterator[Batch]:
        """Run the transfers queued in the ``with`` block and wait for all of them.

        Raises:
            RDSError: One failed.
        """
        with _translated("an RDS transfer"):
            stream = self._rds.Stream(device=self._index, node_id=self._numa_node)
            batch = Batch(self._vmem, stream)
            failure: BaseException | None = None
            try:
                with stream:
                    try:
                        yield batch
                    except BaseException as error:
                        # Left as if all were well: that it waits then too is assumed
                        # (A3), but not that it does when it is left by an error.
                        failure = error
                if failure is not None:
                    raise failure
            finally:
                # Also what failed: part of it may have changed.
                for target in batch.read_into:
                    self._rds.mark_device_updated(target.data_ptr())  # A5
