# SPDX-License-Identifier: Apache-2.0
"""What the simulated NPU costs over a plain memcpy of the same bytes.

    rbln-sim exec -- python benchmarks/simulator.py

Copies from the simulated device are timed in turn with memcpy; medians are compared.
The exit code is 1 if a bound is missed: 128 MiB device to host in 1.15 times memcpy's
time, 4 KiB in memcpy's time and 20 us. Measure on a quiet machine.
"""

# Standard
from collections.abc import Callable
import argparse
import ctypes
import os
import statistics
import sys
import time

U64 = ctypes.c_uint64
MIB = 1 << 20


def _time_us(call: Callable[..., object], arguments: list[int], repeats: int) -> float:
    begin = time.perf_counter_ns()
    for _ in range(repeats):
        call(*arguments)
    return (time.perf_counter_ns() - begin) / 1000 / repeats


def measure(size: int, rounds: int, repeats: int) -> tuple[float, float]:
    """Time the simulated copy and memcpy in turn.

    Args:
        size: Bytes of a copy.
        rounds: Measurements of each.
        repeats: Copies per measurement.

    Returns:
        Medians in us: simulated copy, memcpy.

    Raises:
        RuntimeError: The copy left other bytes than the device holds.
        OSError: There is no simulator.
    """
    # The library is found as torch-rbln finds it; these are its own calls.
    library = ctypes.CDLL("librbln.so")
    copy = library["_ZN4rbln15rbln_memcpy_v2hEmmm"]
    memcpy = ctypes.CDLL(None).memcpy
    copy.argtypes = memcpy.argtypes = [U64] * 3
    address, view = U64(), U64()
    malloc = library["_ZN4rbln17rbln_malloc_eagerEjmRm"]
    failed = malloc(ctypes.c_uint32(0), U64(size), ctypes.byref(address))
    failed |= library.rbln_sim_device_view(address, U64(size), ctypes.byref(view))
    target = ctypes.create_string_buffer(size)
    host = ctypes.addressof(target)
    if not failed:
        ctypes.memset(view.value, 7, size)
        failed = copy(address, host, size)
    if failed or target.raw != b"\x07" * size:
        raise RuntimeError(f"the copy of {size} bytes failed with code {failed}")
    copies, plain = [], []
    for _ in range(rounds):
        copies.append(_time_us(copy, [address.value, host, size], repeats))
        plain.append(_time_us(memcpy, [host, view.value, size], repeats))
    return statistics.median(copies), statistics.median(plain)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print a table.

    Returns:
        The exit code: 0, or 1 if a bound is missed or there is no simulator.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    rounds = parser.parse_args(arguments).rounds
    try:
        large, large_memcpy = measure(128 * MIB, rounds, 1)
        small, small_memcpy = measure(4096, rounds, 200)
    except (OSError, AttributeError, RuntimeError) as error:
        print(
            f"{error}; run it with `rbln-sim exec -- python {sys.argv[0]}`",
            file=sys.stderr,
        )
        return 1
    print(f"load {os.getloadavg()[0]:.2f}, medians of {rounds}")
    print(f"{'copy':12} {'us':>12} {'memcpy us':>12} {'bound us':>12}")
    missed = False
    for what, took, plain, bound in (
        ("128 MiB D2H", large, large_memcpy, 1.15 * large_memcpy),
        ("4 KiB D2H", small, small_memcpy, small_memcpy + 20),
    ):
        verdict = "ok" if took <= bound else "MISSED"
        print(f"{what:12} {took:>12,.2f} {plain:>12,.2f} {bound:>12,.2f} {verdict}")
        missed |= took > bound
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
