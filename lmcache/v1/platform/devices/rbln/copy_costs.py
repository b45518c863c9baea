# SPDX-License-Identifier: Apache-2.0
"""Which way between paged blocks and host memory is cheaper. No byte moves here.

*Direct* copies cross the host link with one descriptor per piece. *Device-staged* ones
collect the pieces in device memory first, and cross it with one descriptor per staging
buffer. That costs a copy inside the device, and pays when pieces are small.
"""

# Future
from __future__ import annotations

# Standard
from dataclasses import dataclass

#: Contiguous copies between device and pinned host memory, in GB/s. A known figure of
#: the hardware (design: "Speed").
HOST_GBPS = 58.0
#: Copies inside the device, in GB/s. From the same source.
DEVICE_GBPS = 240.0


@dataclass(frozen=True)
class CopyCosts:
    """What copies cost.

    Attributes:
        host_descriptor_us: Fixed time of a copy between host and device, in
            microseconds; about 17 on hardware.
        device_descriptor_us: Fixed time of a copy inside the device. No figure of it
            is known.
        host_gbps: Throughput of the host link.
        device_gbps: Throughput of copies inside the device.
    """

    host_descriptor_us: float
    device_descriptor_us: float
    host_gbps: float = HOST_GBPS
    device_gbps: float = DEVICE_GBPS

    def direct_us(self, num_bytes: int, pieces: int) -> float:
        """Return the time of direct copies.

        Args:
            num_bytes: Bytes of the whole transfer.
            pieces: Contiguous pieces they lie in.

        Returns:
            Microseconds.
        """
        return pieces * self.host_descriptor_us + num_bytes / (self.host_gbps * 1e3)

    def device_staged_us(self, num_bytes: int, pieces: int, buffer_bytes: int) -> float:
        """Return the time of device-staged copies, both on one stream.

        Args:
            num_bytes: Bytes of the whole transfer.
            pieces: Contiguous pieces they lie in.
            buffer_bytes: Bytes of a staging buffer.

        Returns:
            Microseconds.
        """
        inside = pieces * self.device_descriptor_us + num_bytes / (
            self.device_gbps * 1e3
        )
        return inside + self.direct_us(num_bytes, -(-num_bytes // buffer_bytes))


#: The known figures; copies inside the device are taken for free until measured.
HARDWARE_COSTS = CopyCosts(host_descriptor_us=17.0, device_descriptor_us=0.0)
