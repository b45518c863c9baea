# SPDX-License-Identifier: Apache-2.0
"""Lets workers die while they write, and judges what they leave on the NVMe.

Run by test_rds_crash.py on the simulator. Everything is imported once; each worker is
forked from here before any NPU is open, opens its own, and is killed. Prints a
JSON object with what was found.
"""

# Standard
from collections import Counter
from collections.abc import Iterator
import itertools
import json
import os
import random
import signal
import struct
import sys

# Third Party
from rds_support import (
    CHUNK_BYTES,
    REGION_BYTES,
    Engine,
    config_of,
    content_of,
    key_of,
    metadata_of,
)
import xxhash

# First Party
from lmcache_rbln.storage_plugin.rds_backend import RDSBackend
from lmcache_rbln.storage_plugin.rds.header import key_digest

CHUNKS = 40
#: Of payloads and of headers, which follow them.
MOST_WRITES = 40
#: What direct writes are multiples of.
UNIT = 4096
DIGESTS = {key_digest(key_of(n).to_string()): n for n in range(CHUNKS)}
CONTENT = {n: content_of(n) for n in range(CHUNKS)}


def die_in(write: int) -> None:
    """Die by SIGKILL in the middle of a write to the NVMe, counted from now on."""
    whole, writes = os.pwritev, itertools.count()

    def half(fd: int, parts: list[memoryview], at: int) -> int:
        if next(writes) < write:
            return whole(fd, parts, at)
        whole(fd, [parts[0][: len(parts[0]) // 2 // UNIT * UNIT]], at)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    os.pwritev = half  # type: ignore[assignment]


def worker(ready: int, write: int) -> None:
    """Begin cold, then write until it dies, over what the worker before left."""
    backend = RDSBackend(config_of({"rds_max_chunks": 6}), metadata_of())
    engine = Engine(backend)
    cold = not any(engine.holds(*range(CHUNKS)))
    engine.store(0)
    good = engine.load(0) == [True]
    os.write(ready, b"1" if cold and good else b"0")
    die_in(write)
    number = 0
    while True:
        number = (number + 1) % CHUNKS
        engine.store(number, (number + 20) % CHUNKS)


def chunks_on(path: str) -> Iterator[str]:
    """What each region of the NVMe is: ``whole``, ``rejected``, or ``WRONG``."""
    with open(path, "rb") as file:
        while len(data := file.read(REGION_BYTES)) == REGION_BYTES:
            if not any(data):
                return
            # By docs/rds.md: payload bytes, key, checksum, and the header's own.
            (nbytes,) = struct.unpack_from("<Q", data, 24)
            key, checksum = data[32:48], data[48:64]
            (seal,) = struct.unpack_from("<Q", data, 4088)
            payload = data[4096 : 4096 + nbytes]
            if (
                data[:8] != b"RBLNKVC\n"
                or seal != xxhash.xxh3_64_intdigest(data[:4088])
                or checksum != xxhash.xxh3_128(payload).digest()
            ):
                yield "rejected"
            elif (
                len(payload) != CHUNK_BYTES
                or key not in DIGESTS
                or payload != CONTENT[DIGESTS[key]]
            ):
                yield "WRONG"
            else:
                yield "whole"


def main(times: int, path: str) -> None:
    """Let ``times`` workers die at random points."""
    chance = random.Random(0)
    found: Counter[str] = Counter()
    for _ in range(times):
        write = chance.randrange(MOST_WRITES)
        receive, send = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(receive)
            try:
                worker(send, write)
            finally:
                os._exit(1)  # a worker that ends by itself has failed
        os.close(send)
        found["started well"] += os.read(receive, 1) == b"1"
        os.close(receive)
        _, status = os.waitpid(pid, 0)
        found["killed"] += os.WIFSIGNALED(status)
        found.update(chunks_on(path))
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), os.environ["RBLN_SIM_RDS_FILE"])
