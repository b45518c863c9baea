# SPDX-License-Identifier: Apache-2.0
"""What librbln.so exports, what torch-rbln needs, and how truthful each symbol is."""

# Standard
import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

# First Party
from rbln_sim.activation import LIBRARY_NAME, environment, library_path

# Looked up by name instead of being linked.
LOOKED_UP = frozenset({"rbln_abi_current", "rbln_abi_min_supported"})
CONTROL_PREFIX = "rbln_sim_"

KNOWN, ASSUMED, UNSUPPORTED = "known", "assumed", "unsupported"


@dataclass(frozen=True)
class Behaviour:
    """How the simulator treats a group of symbols.

    Attributes:
        names: Patterns of function names, without namespace and parameters.
        status: ``known`` (from a named source), ``assumed``, or ``unsupported`` (fails
            with its own name).
        note: What is simulated, and where that comes from.
    """

    names: tuple[str, ...]
    status: str
    note: str


BEHAVIOURS: tuple[Behaviour, ...] = (
    Behaviour(
        ("rbln_abi_current", "rbln_abi_min_supported", "rbln_runtime_available"),
        KNOWN,
        "ABI number 6, from torch-rbln's `abi_check.py`",
    ),
    Behaviour(
        ("rbln_get_device_count", "rbln_register_device_id"),
        KNOWN,
        "calls and messages of torch-rbln's device mapping: counting opens nothing, "
        "registering opens the NPUs",
    ),
    Behaviour(
        ("rbln_get_device_properties", "rbln_get_device_memory_info"),
        KNOWN,
        "layouts from torch-rbln's accesses; memory of other processes is not seen "
        "(assumed), 4 chiplets as vllm-rbln wants for RBLN-CR03",
    ),
    Behaviour(
        (
            "rbln_get_memory_stats*",
            "rbln_reset_*_memory_stats",
            "GetA*",
            "GetCached*",
            "GetMemoryStats",
            "GetNum*",
            "GetReserved*",
        ),
        ASSUMED,
        "layout known from torch-rbln; an allocation is spread evenly over all "
        "chiplets, in pieces of 4 KiB",
    ),
    Behaviour(
        ("rbln_empty_cache",),
        ASSUMED,
        "no cache exists: freed memory is given back at once",
    ),
    Behaviour(
        ("rbln_malloc_lazy", "rbln_malloc_eager", "rbln_free", "rbln_mark_zeros"),
        KNOWN,
        "torch-rbln's public runtime header; a free does not wait for queued work, the "
        "bytes go when it is done (assumed)",
    ),
    Behaviour(
        ("rbln_set_raw_memory_alloc",),
        KNOWN,
        "binds device memory, from the documentation of `bind_device_memory`",
    ),
    Behaviour(
        ("rbln_set_device_alloc_layout_like",),
        ASSUMED,
        "layouts are always flat: binds the target and adopts the data type",
    ),
    Behaviour(
        (
            "rbln_set_memory_info",
            "rbln_get_memory_info",
            "rbln_get_torch_device_id_from_vaddr",
        ),
        KNOWN,
        "torch-rbln's public runtime header; the physical shape is the same (assumed)",
    ),
    Behaviour(
        ("rbln_memcpy_h2v", "rbln_memcpy_v2h", "rbln_memcpy_v2v"),
        KNOWN,
        "torch-rbln's public runtime header; order behind the current stream; between "
        "two data types a device copy goes through the host (assumed)",
    ),
    Behaviour(
        ("rbln_memcpy_*_async",),
        KNOWN,
        "calls of torch-rbln; handle 0 where the bytes are not in device memory",
    ),
    Behaviour(
        ("rbln_memcpy_*_multi",),
        ASSUMED,
        "synchronous; overlapping destinations are refused, which the real runtime "
        "leaves to the caller; no limit on the number of entries; in deferred mode in "
        "an order by the schedule",
    ),
    Behaviour(
        (
            "rbln_v_borrow_host_ptr",
            "rbln_v_acquire_host_ptr_for_overwrite",
            "rbln_v_return_borrowed",
        ),
        KNOWN,
        "calls of torch-rbln; part of device-latest memory is lent as a copy (assumed)",
    ),
    Behaviour(
        ("rbln_stream_*", "rbln_*_current_stream", "rbln_device_synchronize"),
        KNOWN,
        "handles as torch-rbln takes them apart; the current stream is per thread and "
        "device",
    ),
    Behaviour(
        ("rbln_event_*",),
        KNOWN,
        "calls of torch-rbln; an event never recorded counts as done (assumed)",
    ),
    Behaviour(
        ("rbln_prof_*",),
        KNOWN,
        "axes of torch-rbln's `profiler.py`; of the rejects only `src_not_on_device` "
        "and `dtype_mismatch` occur, of the hidden bounces all but `src_synced` "
        "(assumed)",
    ),
    Behaviour(
        ("Rccl", "~Rccl", "Init*", "GetUniqueIdForBroadcast", "PrepareContext*"),
        ASSUMED,
        "setting up a group succeeds; the unique id is no address",
    ),
    Behaviour(
        ("Send", "Recv"),
        ASSUMED,
        "bytes go through a named pipe in the state folder; done when the pipe has "
        "them; each counts as one copy inside a device",
    ),
    Behaviour(
        (
            "AllGather",
            "AllReduce",
            "Broadcast",
            "CheckChunksDeviceAddrsContiguous",
            "ReduceScatter",
            "Scatter",
        ),
        UNSUPPORTED,
        "collectives on device memory",
    ),
    Behaviour(
        ("rbln_kineto_is_active", "rbln_release_offload_temp_storage"),
        ASSUMED,
        "answers that no profiler session exists, that no file was made: both are true",
    ),
    Behaviour(("rbln_kineto_*_session*",), UNSUPPORTED, "torch.profiler"),
    Behaviour(
        ("rbln_set_file_offloading_enabled",),
        UNSUPPORTED,
        "offloading host memory to files; switching it off succeeds",
    ),
    Behaviour(
        ("rbln_rt_*",), UNSUPPORTED, "running a compiled program through its handle"
    ),
)


def base_name(mangled: str) -> str:
    """Return the last name of a mangled C++ symbol, or a C symbol as it is.

    Args:
        mangled: A symbol as in the symbol table, for example
            ``_ZN4rbln9rbln_freeEm``.

    Returns:
        The function's own name, for example ``rbln_free``.
    """
    if not mangled.startswith("_Z"):
        return mangled
    at = 2
    nested = mangled.startswith(("_ZN", "_ZNK"))
    if nested:
        at = 4 if mangled.startswith("_ZNK") else 3
    name = ""
    while at < len(mangled) and mangled[at].isdigit():
        end = at
        while mangled[end].isdigit():
            end += 1
        length = int(mangled[at:end])
        name = mangled[end : end + length]
        at = end + length
        if not nested:
            break
    if mangled[at : at + 2] in ("C1", "C2"):
        return name
    if mangled[at : at + 2] in ("D1", "D2"):
        return "~" + name
    return name


def behaviour_of(symbol: str) -> Behaviour | None:
    """Return the entry of the table that covers ``symbol``.

    Args:
        symbol: A symbol as in the symbol table.

    Returns:
        The first entry with a pattern that matches, or ``None``.
    """
    name = base_name(symbol)
    for behaviour in BEHAVIOURS:
        if any(fnmatchcase(name, pattern) for pattern in behaviour.names):
            return behaviour
    return None


def dynamic_symbols(path: Path) -> tuple[set[str], set[str]]:
    """Return what a shared library defines, and what it needs from others.

    Weak needs are left out: the loader does without them.

    Raises:
        CalledProcessError: It is no library.
    """
    command = ["nm", "-DP", str(path)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    symbols = [line.split()[:2] for line in listed.stdout.splitlines()]
    return (
        {name.split("@")[0] for name, kind in symbols if kind not in "Uwv"},
        {name.split("@")[0] for name, kind in symbols if kind == "U"},
    )


def exported() -> frozenset[str]:
    """Return what the simulated library exports."""
    return frozenset(dynamic_symbols(library_path())[0])


def needed() -> frozenset[str]:
    """Return what the installed torch-rbln needs from ``librbln.so``.

    That is every symbol that one of its libraries leaves undefined and no library of a
    process that has loaded them defines, except ``librbln.so`` itself.

    Raises:
        RuntimeError: torch-rbln is not installed, or cannot be loaded.
    """
    spec = importlib.util.find_spec("torch_rbln")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("torch-rbln is not installed")
    mapped = subprocess.run(
        [sys.executable, "-c", "import torch; print(open('/proc/self/maps').read())"],
        env=environment(),
        capture_output=True,
        text=True,
    )
    if mapped.returncode != 0:
        raise RuntimeError(f"`import torch` failed:\n{mapped.stderr}")
    package = Path(spec.submodule_search_locations[0]).resolve()
    undefined: set[str] = set()
    defined: set[str] = set()
    paths = {
        line.split(None, 5)[5] for line in mapped.stdout.splitlines() if "/" in line
    }
    for path in sorted(map(Path, paths)):
        if path.name == LIBRARY_NAME or not path.is_file():
            continue
        try:
            offers, wants = dynamic_symbols(path)
        except subprocess.CalledProcessError:
            continue
        defined |= offers
        if package in path.resolve().parents:
            undefined |= wants
    return frozenset(undefined - defined)
