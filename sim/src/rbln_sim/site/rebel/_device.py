# SPDX-License-Identifier: Apache-2.0
"""The bytes of the simulated device, for graphs that run on the host.

The only user of librbln.so's control API (``sim/csrc/api/rbln_sim.h``). Device
addresses are not host addresses: :func:`host_alias` is the one way from a device
tensor to bytes the host can compute on.
"""

import ctypes
import functools
from typing import Any

import torch


@functools.cache
def _library() -> ctypes.CDLL:
    # By soname: torch-rbln has mapped it already, and that copy must be the one.
    library = ctypes.CDLL("librbln.so")
    try:
        library.rbln_sim_device_view.argtypes = [
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.POINTER(ctypes.c_uint64),
        ]
        library.rbln_sim_device_view.restype = ctypes.c_int
        word = ctypes.POINTER(ctypes.c_uint64)
        library.rbln_sim_allocation.argtypes = [ctypes.c_uint64, word, word]
        library.rbln_sim_allocation.restype = ctypes.c_int
        library.rbln_sim_device_opened.argtypes = [
            ctypes.c_uint32,
            ctypes.POINTER(ctypes.c_uint32),
        ]
        library.rbln_sim_device_opened.restype = ctypes.c_int
        library.rbln_sim_host_view_known.argtypes = [ctypes.c_uint64, ctypes.c_uint32]
        library.rbln_sim_host_view_known.restype = ctypes.c_int
        for call in (library.rbln_sim_graph_begin, library.rbln_sim_graph_end):
            call.argtypes = [ctypes.c_uint32]
            call.restype = ctypes.c_int
    except AttributeError as error:
        raise RuntimeError(
            "the loaded librbln.so is not the simulator's (no rbln_sim_* control "
            "API), but the simulated `rebel` is on sys.path; take its folder off "
            "PYTHONPATH, or start the process with `rbln-sim exec --`"
        ) from error
    return library


def is_open(device: int) -> bool:
    """Tell whether this process has opened a device; opens nothing.

    Args:
        device: torch device index.
    """
    opened = ctypes.c_uint32()
    code = _library().rbln_sim_device_opened(device, ctypes.byref(opened))
    return code == 0 and opened.value == 1


def allocation_of(vaddr: int) -> tuple[int, int]:
    """Find the allocation that holds a device address.

    Args:
        vaddr: Device address.

    Returns:
        Its base address and its size in bytes.

    Raises:
        RuntimeError: There is no live allocation at the address.
    """
    base, nbytes = ctypes.c_uint64(), ctypes.c_uint64()
    code = _library().rbln_sim_allocation(
        vaddr, ctypes.byref(base), ctypes.byref(nbytes)
    )
    if code != 0:
        raise RuntimeError(f"{vaddr:#x} is in no live device allocation (code {code})")
    return base.value, nbytes.value


def device_bytes(base: int, nbytes: int) -> int:
    """Return where the simulator keeps device bytes, in its own memory.

    The device copy becomes the latest one. The address is valid until the allocation
    is freed.

    Args:
        base: Device address.
        nbytes: Number of bytes.

    Raises:
        RuntimeError: They are not device memory, or the device is lost or full.
    """
    address = ctypes.c_uint64()
    code = _library().rbln_sim_device_view(base, nbytes, ctypes.byref(address))
    if code != 0:
        raise RuntimeError(
            f"device memory {base:#x} (+{nbytes} bytes) cannot be used (code {code})"
        )
    return address.value


def set_host_view_known(vaddr: int, known: bool) -> None:
    """Tell whether the runtime knows of all changes to an allocation's device bytes.

    Args:
        vaddr: A device address in it.
        known: False makes what the host reads poison.

    Raises:
        RuntimeError: There is no live allocation at the address.
    """
    code = _library().rbln_sim_host_view_known(vaddr, int(known))
    if code != 0:
        raise RuntimeError(f"{vaddr:#x} is in no live device allocation (code {code})")


def graph_begin(device: int) -> None:
    """Wait until a graph may run on the calling thread's current stream.

    Args:
        device: torch device index.

    Raises:
        RuntimeError: The device reports an error.
    """
    code = _library().rbln_sim_graph_begin(device)
    if code != 0:
        raise RuntimeError(
            f"rbln_sim_graph_begin failed for rbln:{device} (code {code})"
        )


def graph_end(device: int) -> None:
    """Tell that the graph this thread began on a device has run.

    Args:
        device: torch device index.

    Raises:
        RuntimeError: No graph was begun.
    """
    code = _library().rbln_sim_graph_end(device)
    if code != 0:
        raise RuntimeError(f"rbln_sim_graph_end failed for rbln:{device} (code {code})")


@functools.lru_cache(maxsize=4096)
def _host_bytes(address: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    # Cached by address, which is safe: it is only asked for right after the
    # runtime answered with this address, and it owns nothing. Never an inference
    # tensor, which could not be written outside of inference mode.
    with torch.inference_mode(False):
        buffer = (ctypes.c_uint8 * nbytes).from_address(address)
        whole = nbytes - nbytes % dtype.itemsize
        return torch.frombuffer(buffer, dtype=torch.uint8)[:whole].view(dtype)


def host_alias(tensor: torch.Tensor) -> torch.Tensor:
    """View a device tensor's bytes as a CPU tensor, without a copy.

    The device copy becomes the latest one; the alias must be used only while
    ``tensor`` is alive.

    Args:
        tensor: A tensor on ``rbln``, of any shape and strides.

    Returns:
        A CPU tensor of the same shape, strides, offset and dtype.

    Raises:
        RuntimeError: The address is not (or no longer) device memory.
    """
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    if nbytes == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    address = ctypes.c_uint64()
    code = _library().rbln_sim_device_view(
        storage.data_ptr(), nbytes, ctypes.byref(address)
    )
    if code != 0:
        raise RuntimeError(
            f"device memory {storage.data_ptr():#x} (+{nbytes} bytes) of a "
            f"{tuple(tensor.shape)} {tensor.dtype} tensor on {tensor.device} is not "
            f"mapped (code {code}): the tensor was freed or never allocated there"
        )
    raw = _host_bytes(address.value, nbytes, tensor.dtype)
    return raw.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def on_device(value: Any) -> bool:
    """Tell whether ``value`` is a tensor on the simulated device."""
    return isinstance(value, torch.Tensor) and value.device.type == "rbln"


def to_device(result: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Put a graph's result into new device memory, device-latest.

    Args:
        result: CPU tensor.
        device: An ``rbln`` device.

    Returns:
        A tensor on ``device`` with the same values; strides are kept when they
        are dense.
    """
    out = torch.empty_like(result, device=device)
    host_alias(out).copy_(result)
    return out
