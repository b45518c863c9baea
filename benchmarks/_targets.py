# SPDX-License-Identifier: Apache-2.0
"""The targets of block transfers, and whether rows meet them. Pure."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

# First Party
from benchmarks._cases import BLOCKS_FIRST, GATHER, KV_FIRST, MLA, Case, Row
from benchmarks._copies import DESCRIPTOR_US, DEVICE_GBPS, REGISTERED_GBPS

STAGING_MIB = 64.0
STORE_MS = 1.0
RESTORE_MS = 0.3
_LARGE_BYTES = 8_000_000
#: Host descriptors per block and layer.
_DESCRIPTORS = {BLOCKS_FIRST: 1, KV_FIRST: 2, MLA: 1}
#: Modelled time over that of the bytes alone, at blocks of 256 and more.
_MODELLED = 1.5


@dataclass(frozen=True)
class Check:
    """One target on one measurement.

    Attributes:
        target: The target's name.
        what: What was measured.
        wanted: The bound, for people.
        got: What was measured, for people.
        held: Whether the target is met.
    """

    target: str
    what: str
    wanted: str
    got: str
    held: bool


def _at_most(target: str, what: str, got: float, limit: float, unit: str) -> Check:
    # Bounds hold for what is printed.
    held = round(got, 2) <= limit
    return Check(target, what, f"<= {limit:.2f} {unit}", f"{got:.2f}", held)


def _at_least(target: str, what: str, got: float, limit: float, unit: str) -> Check:
    held = round(got, 2) >= limit
    return Check(target, what, f">= {limit:.2f} {unit}", f"{got:.2f}", held)


def _bounds(row: Row) -> Iterator[tuple[str, float | None, float]]:
    """Yield the row's targets: name, most times the floor, least times stock."""
    case = row.case
    if case.threads > 1:
        return
    if row.layout == MLA:
        if case.blocks_per_chunk <= 4:
            yield f"MLA {row.direction}", 1.15, 1.5
        return
    if case.bytes >= _LARGE_BYTES:
        gathers = row.direction == GATHER
        yield f"HND {row.direction}", *((0.95, 2.0) if gathers else (1.10, 1.8))
    if (case.model, case.block_size, case.blocks) == ("Qwen3-1.7B", 128, 1):
        yield "one 128-token block", None, 1.3


def check_times(rows: Sequence[Row]) -> list[Check]:
    """Check the ratios to the floor and to stock.

    Args:
        rows: Rows timed without a cost model.

    Returns:
        A check per row and target.
    """
    checks = []
    for row in rows:
        what = f"{row.case} {row.layout} {row.direction}"
        to_floor = row.ratio("ours", "floor")
        to_stock = row.ratio("stock", "ours")
        if to_floor is None or to_stock is None:
            checks.append(Check("measured", what, "times", str(row.failures), False))
            continue
        for target, most, least in _bounds(row):
            if most is not None:
                checks.append(_at_most(target, what, to_floor, most, "x floor"))
            checks.append(
                _at_least(target, what, to_stock, least, "x as fast as stock")
            )
        checks.append(_at_least("any row", what, to_stock, 1.0, "x as fast as stock"))
    return checks


def check_descriptors(rows: Sequence[Row]) -> list[Check]:
    """Check the host descriptors of rows whose copies were counted."""
    checks = []
    for row in rows:
        copies = row.counts.get("ours")
        if copies is None:
            continue
        case = row.case
        # Adjacent ids of a chunk are one run.
        runs = case.chunks if case.adjacent else case.blocks
        what = f"{case} {row.layout} {row.direction}"
        got = copies.host_descriptors / (runs * case.geometry.layers)
        unit = f"per {'run' if case.adjacent else 'block'} and layer"
        limit = float(_DESCRIPTORS[row.layout])
        checks.append(_at_most("host descriptors", what, got, limit, unit))
    return checks


def direct_seconds(case: Case, layout: str) -> float:
    """Return the modelled time of copying every block by itself."""
    descriptors = _DESCRIPTORS[layout] * case.blocks * case.geometry.layers
    return descriptors * DESCRIPTOR_US / 1e6 + case.bytes / REGISTERED_GBPS / 1e9


def staged_seconds(case: Case) -> float:
    """Return the modelled time of collecting a chunk on the device before its copy."""
    per_byte = 1 / REGISTERED_GBPS / 1e9 + 1 / DEVICE_GBPS / 1e9
    return case.chunks * DESCRIPTOR_US / 1e6 + case.bytes * per_byte


def check_modelled(rows: Sequence[Row]) -> list[Check]:
    """Check the copies' time on the hardware's links.

    Args:
        rows: Rows counted with the cost model.

    Returns:
        A check per row.
    """
    checks = []
    for row in rows:
        case, copies = row.case, row.counts.get("ours")
        if copies is None:
            continue
        what = f"{case} {row.layout} {row.direction}"
        wire = case.bytes / REGISTERED_GBPS / 1e9
        if case.block_size >= 256:
            limit, unit = _MODELLED, "x bytes / 58 GB/s"
        else:
            cheaper = min(direct_seconds(case, row.layout), staged_seconds(case))
            # Some tiles more than one copy are no other choice.
            limit, unit = round(cheaper / wire * 1.1, 2), "x bytes / 58 GB/s"
        checks.append(
            _at_most("cost model", what, copies.modelled_s / wire, limit, unit)
        )
    return checks


def check_staging(staging: Mapping[str, float]) -> list[Check]:
    """Check the staging memory of ours.

    Args:
        staging: MiB by contender and threads.
    """
    return [
        _at_most("staging", what, mib, STAGING_MIB, "MiB")
        for what, mib in staging.items()
        if what.startswith("ours")
    ]


def check_engine_time(
    store_ms: Mapping[str, float], restore_ms: Mapping[str, float]
) -> list[Check]:
    """Check the times that a store and a restore take on the engine's thread.

    Args:
        store_ms: Median time in ms by what was stored.
        restore_ms: The same of what was restored.
    """
    unit = "ms on the engine's thread"
    return [
        _at_most(f"asynchronous {target}", what, ms, limit, unit)
        for target, times, limit in (
            ("store", store_ms, STORE_MS),
            ("restore", restore_ms, RESTORE_MS),
        )
        for what, ms in times.items()
    ]
