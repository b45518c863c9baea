# SPDX-License-Identifier: Apache-2.0
"""Copies of a call, from a trace of the simulator, and what they cost on hardware."""

# Future
from __future__ import annotations

# Standard
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

# First Party
from benchmarks._cases import Copies

#: Figures of the hardware: GB/s of registered and of pageable host memory and inside
#: the device, and the time of one host descriptor.
REGISTERED_GBPS = 58.0
PAGEABLE_GBPS = 14.0
DEVICE_GBPS = 240.0
DESCRIPTOR_US = 17.0
#: The same as settings of the simulator, for a backend that measures.
SIMULATOR_SETTINGS = {
    "RBLN_SIM_GBPS": f"{REGISTERED_GBPS:g}",
    "RBLN_SIM_PAGEABLE_GBPS": f"{PAGEABLE_GBPS:g}",
    "RBLN_SIM_D2D_GBPS": f"{DEVICE_GBPS:g}",
    "RBLN_SIM_DESCRIPTOR_US": f"{DESCRIPTOR_US:g}",
}
_HOST = ("d2h", "h2d")
_DEVICE = "d2d"


def count(operations: Sequence[dict[str, Any]]) -> Copies:
    """Sum up the traced operations of one call.

    Args:
        operations: Lines of the trace, see ``rbln_sim.trace``.

    Returns:
        Its copies.
    """
    copies = [
        operation
        for operation in operations
        # What is served from host memory crosses no link.
        if operation["kind"] in (*_HOST, _DEVICE) and operation["via"] != "host"
    ]
    host = [op["descriptors"] for op in copies if op["kind"] in _HOST]
    device = [op["descriptors"] for op in copies if op["kind"] == _DEVICE]
    return Copies(len(copies), sum(host), sum(device), modelled_seconds(copies))


def link_seconds(operation: dict[str, Any]) -> float:
    """Return how long a copy holds its link.

    Host descriptors have a fixed cost; copies inside the device go by bytes alone. An
    asynchronous copy counts as one of registered memory, as torch-rbln uses them.
    """
    if operation["kind"] == _DEVICE:
        return float(operation["bytes"]) / DEVICE_GBPS / 1e9
    pageable = operation["stream"] is None
    speed = PAGEABLE_GBPS if pageable else REGISTERED_GBPS
    descriptors = operation["descriptors"] * DESCRIPTOR_US / 1e6
    return descriptors + float(operation["bytes"]) / speed / 1e9


def modelled_seconds(copies: Sequence[dict[str, Any]]) -> float:
    """Return when the last copy would end if the host took no time.

    Copies of a stream follow each other, copies on a link too, and a synchronous copy
    waits for all before it.
    """
    streams: dict[Any, float] = defaultdict(float)
    links: dict[tuple[Any, Any], float] = defaultdict(float)
    host = 0.0
    for copy in sorted(copies, key=lambda copy: copy["begin"]):
        link = (copy["device"], copy["kind"])
        stream = copy["stream"]
        ready = (
            max(streams.values(), default=0.0) if stream is None else streams[stream]
        )
        end = max(host, ready, links[link]) + link_seconds(copy)
        links[link] = streams[stream] = end
        if stream is None:
            host = end
    return max(streams.values(), default=0.0)
