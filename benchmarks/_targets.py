# SPDX-License-Identifier: Apache-2.0
"""The targets of block transfers, and whether rows meet them. Pure."""

# Standard
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

# First Party
from benchmarks._cases import BLOCKS_FIRST, GATHER, KV_FIRST, MLA, OURS, Case, Row
from benchmarks._counting import DESCRIPTOR_US, DEVICE_GBPS, REGISTERED_GBPS

STORE_MS = 1.0
RESTORE_MS = 0.3
_LARGE_BYTES = 8_000_000
#: Host descriptors per block and layer.
_DESCRIPTORS = {BLOCKS_FIRST: 1, KV_FIRST: 2, MLA: 1}
#: Modelled time over that of the bytes alone, at blocks of 256 and more.
_MODELLED = 1.5


@dataclass(frozen=True)
class Check:
    """One target on one measurement; bounds are for what is printed."""

    target: str
    what: str
    wanted: str
    got: str
    held: bool


def _at_most(target: str, what: object, got: float, limit: float, unit: str) -> Check:
    held = round(got, 2) <= limit
    return Check(target, str(what), f"<= {limit:.2f} {unit}", f"{got:.2f}", held)


def _at_least(target: str, row: Row, got: float, limit: float) -> Check:
    wanted = f">= {limit:.2f} x as fast as stock"
    return Check(target, str(row), wanted, f"{got:.2f}", round(got, 2) >= limit)


def _bounds(row: Row) -> Iterator[tuple[str, float | None, float]]:
    """Yield the row's targets: name, most times the floor, least times stock."""
    case = row.case
    if case.threads == 1 and row.layout == MLA and case.blocks_per_chunk <= 4:
        yield f"MLA {row.direction}", 1.15, 1.5
    if case.threads == 1 and row.layout != MLA:
        if case.bytes >= _LARGE_BYTES:
            gathers = row.direction == GATHER
            yield f"HND {row.direction}", *((0.95, 2.0) if gathers else (1.10, 1.8))
        if (case.model, case.block_size, case.blocks) == ("Qwen3-1.7B", 128, 1):
            yield "one 128-token block", None, 1.3
    yield "any row", None, 1.0


def check_times(rows: Sequence[Row]) -> list[Check]:
    """Check the ratios to the floor and to stock of rows timed without a cost model."""
    checks = []
    for row in rows:
        to_floor, to_stock = row.ratio("ours", "floor"), row.ratio("stock", "ours")
        assert to_floor is not None and to_stock is not None, row
        for target, most, least in _bounds(row):
            if most is not None:
                checks.append(_at_most(target, row, to_floor, most, "x floor"))
            checks.append(_at_least(target, row, to_stock, least))
    return checks


def check_descriptors(rows: Sequence[Row]) -> list[Check]:
    """Check the host descriptors of rows whose copies were counted."""
    checks = []
    for row in rows:
        case = row.case
        # Adjacent ids of a chunk are one run.
        runs = (case.chunks if case.adjacent else case.blocks) * case.geometry.layers
        unit = f"per {'run' if case.adjacent else 'block'} and layer"
        if OURS in row.copies:
            got = row.copies[OURS].host_descriptors / runs
            limit = _DESCRIPTORS[row.layout]
            checks.append(_at_most("host descriptors", row, got, limit, unit))
    return checks


def direct_seconds(case: Case, layout: str) -> float:
    """Return the modelled time of copying every block by itself."""
    descriptors = _DESCRIPTORS[layout] * case.blocks * case.geometry.layers
    return descriptors * DESCRIPTOR_US / 1e6 + case.bytes / REGISTERED_GBPS / 1e9


def coalesced_seconds(case: Case) -> float:
    """Return the modelled time of collecting a chunk on the device before its copy."""
    per_byte = 1 / REGISTERED_GBPS / 1e9 + 1 / DEVICE_GBPS / 1e9
    return case.chunks * DESCRIPTOR_US / 1e6 + case.bytes * per_byte


def check_modelled(rows: Sequence[Row]) -> list[Check]:
    """Check the copies' time on the links of rows counted with the cost model."""
    checks = []
    for row in rows:
        case, limit = row.case, _MODELLED
        wire = case.bytes / REGISTERED_GBPS / 1e9
        if case.block_size < 256:
            cheaper = min(direct_seconds(case, row.layout), coalesced_seconds(case))
            # Some parts more than one copy are no other choice.
            limit = round(cheaper / wire * 1.1, 2)
        if row.hardware:
            got = row.hardware.modelled_s / wire
            checks.append(_at_most("cost model", row, got, limit, "x bytes / 58 GB/s"))
    return checks


def check_engine_time(
    store_ms: Mapping[str, float], restore_ms: Mapping[str, float]
) -> list[Check]:
    """Check the median ms that stores and restores take on the engine's thread."""
    unit = "ms on the engine's thread"
    return [
        _at_most(f"asynchronous {target}", what, ms, limit, unit)
        for target, times, limit in (
            ("store", store_ms, STORE_MS),
            ("restore", restore_ms, RESTORE_MS),
        )
        for what, ms in times.items()
    ]
