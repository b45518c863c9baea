# SPDX-License-Identifier: Apache-2.0
"""Checksums of device memory are XXH3-128 of exactly the bytes that were named."""

# Standard
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Third Party
import pytest
import torch

# First Party
from lmcache_rbln.storage_plugin.rds_checksum import DeviceChecksum
from lmcache_rbln.storage_plugin.rds_device import RDSDevice
import xxhash

pytestmark = pytest.mark.npu


@pytest.fixture
def device(storage: Any) -> RDSDevice:
    return RDSDevice(torch.device("rbln:0"), numa_node=0)


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 8192, 8193, 3 * 4096 + 7, 5 * 4096])
def test_a_checksum_is_of_exactly_the_first_bytes(
    device: RDSDevice, nbytes: int
) -> None:
    host = torch.randint(0, 256, (5 * 4096,), dtype=torch.uint8)
    tensor = device.empty(5 * 4096)
    tensor.copy_(host)
    checksum = DeviceChecksum(torch.device("rbln:0"), tile_bytes=4096)
    want = xxhash.xxh3_128(host[:nbytes].numpy().tobytes()).digest()
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: checksum.digest(tensor, nbytes), range(16)):
            assert got == want
    assert len(checksum._free) <= 3


def test_threads_in_inference_mode_and_others_share_the_tiles(
    device: RDSDevice,
) -> None:
    tensor = device.empty(3 * 4096)
    want = xxhash.xxh3_128(tensor.cpu().numpy().tobytes()).digest()
    for first in (True, False):
        checksum = DeviceChecksum(torch.device("rbln:0"), tile_bytes=4096)
        for mode in (first, not first, first):
            with torch.inference_mode(mode):
                assert checksum.digest(tensor, 3 * 4096) == want
        assert len(checksum._free) == 1
