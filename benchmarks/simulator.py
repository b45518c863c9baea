# SPDX-License-Identifier: Apache-2.0
"""What the simulated NPU costs over a plain memcpy of the same bytes.

    rbln-sim exec -- python benchmarks/simulator.py

Copies from the simulated device are timed in turn with memcpy, in one run, and medians
are compared. The exit code is 1 if a bound is missed: 128 MiB device to host in 1.15
times memcpy's time, 4 KiB in memcpy's time and 20 us. Measure on a quiet machine.
"""

# Future
from __future__ import annotations

# Standard
import argparse
import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

MIB = 1 << 20
LARGE, SMALL = 128 * MIB, 4096
LARGE_RATIO, SMALL_EXTRA_US = 1.15, 20.0


@dataclass(frozen=True)
class Result:
    """Medians of one size.

    Attributes:
        what: The copy.
        copy_us: Time of the simulated copy in us.
        memcpy_us: Time of memcpy in us.
        bound_us: What the copy may take.
    """

    what: str
    copy_us: float
    memcpy_us: float
    bound_us: float

    @property
    def held(self) -> bool:
        """Whether the copy is as fast as wanted."""
        return self.copy_us <= self.bound_us


class Runtime:
    """The library's own calls, without torch, on bound device memory."""

    def __init__(self) -> None:
        # The library is found as torch-rbln finds it.
        self._library = ctypes.CDLL("librbln.so")
        self._malloc = self._library["_ZN4rbln17rbln_malloc_eagerEjmRm"]
        self._v2h = self._library["_ZN4rbln15rbln_memcpy_v2hEmmm"]
        self._v2h.argtypes = [ctypes.c_uint64] * 3

    def allocate(self, size: int) -> int:
        """Return the address of bound device memory."""
        address = ctypes.c_uint64()
        code = self._malloc(
            ctypes.c_uint32(0), ctypes.c_uint64(size), ctypes.byref(address)
        )
        if code != 0:
            raise RuntimeError(f"rbln_malloc_eager failed with code {code}")
        return address.value

    def device_view(self, address: int, size: int) -> int:
        """Return the host address of simulated device bytes."""
        host = ctypes.c_uint64()
        code = self._library.rbln_sim_device_view(
            ctypes.c_uint64(address), ctypes.c_uint64(size), ctypes.byref(host)
        )
        if code != 0:
            raise RuntimeError(f"rbln_sim_device_view failed with code {code}")
        return host.value

    def read(self, host: int, address: int, size: int) -> None:
        """Copy device bytes to the host, synchronously."""
        if self._v2h(address, host, size) != 0:
            raise RuntimeError("rbln_memcpy_v2h failed")


def _time_us(call: Callable[[], object], repeats: int) -> float:
    begin = time.perf_counter_ns()
    for _ in range(repeats):
        call()
    return (time.perf_counter_ns() - begin) / 1000 / repeats


def measure(
    runtime: Runtime, size: int, rounds: int, repeats: int
) -> tuple[float, float]:
    """Time the simulated copy and memcpy in turn.

    Args:
        runtime: The simulated runtime.
        size: Bytes of a copy.
        rounds: Measurements of each.
        repeats: Copies per measurement.

    Returns:
        Medians in us: simulated copy, memcpy.
    """
    address = runtime.allocate(size)
    source = runtime.device_view(address, size)
    ctypes.memset(source, 7, size)
    target = ctypes.create_string_buffer(size)
    host = ctypes.addressof(target)
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = [ctypes.c_uint64] * 3
    memcpy.restype = ctypes.c_uint64
    copies, plain = [], []
    for turn in range(rounds + 1):
        copy_us = _time_us(lambda: runtime.read(host, address, size), repeats)
        memcpy_us = _time_us(lambda: memcpy(host, source, size), repeats)
        if turn > 0:  # the first touches the pages
            copies.append(copy_us)
            plain.append(memcpy_us)
    if target.raw[:1] + target.raw[-1:] != b"\x07\x07":
        raise RuntimeError("the copy left other bytes than the device holds")
    return statistics.median(copies), statistics.median(plain)


def run(rounds: int) -> list[Result]:
    """Measure both sizes."""
    runtime = Runtime()
    large, large_memcpy = measure(runtime, LARGE, rounds, 1)
    small, small_memcpy = measure(runtime, SMALL, rounds, 200)
    return [
        Result("128 MiB D2H", large, large_memcpy, large_memcpy * LARGE_RATIO),
        Result("4 KiB D2H", small, small_memcpy, small_memcpy + SMALL_EXTRA_US),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print a table.

    Args:
        arguments: Arguments after the program's name; this process's by default.

    Returns:
        The exit code: 0, or 1 if a bound is missed or there is no simulator.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parsed = parser.parse_args(arguments)
    try:
        results = run(parsed.rounds)
    except (OSError, AttributeError, RuntimeError) as error:
        print(
            f"{error}; run it with `rbln-sim exec -- python {sys.argv[0]}`",
            file=sys.stderr,
        )
        return 1
    print(f"load {os.getloadavg()[0]:.2f}, medians of {parsed.rounds}")
    print(f"{'copy':12} {'us':>12} {'memcpy us':>12} {'bound us':>12} {'':6}")
    for result in results:
        print(
            f"{result.what:12} {result.copy_us:>12,.2f} {result.memcpy_us:>12,.2f} "
            f"{result.bound_us:>12,.2f} {'ok' if result.held else 'MISSED':6}"
        )
    return 0 if all(result.held for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
