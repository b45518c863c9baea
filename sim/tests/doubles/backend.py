# SPDX-License-Identifier: Apache-2.0
"""The product's own backend in the place of the test double."""

# Standard
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Third Party
from kv_reference import (
    LAYOUTS,
    Case,
    as_bytes,
    assert_same_bytes,
    move,
    random_bits,
    transfer,
    upload,
)
import torch

# First Party
from lmcache.v1.platform.devices.rbln import staging
from sim.tests.doubles.bugs import Bug
from sim.tests.doubles.scenarios import WrongBytesError

DTYPES = (torch.bfloat16, torch.float16)
BLOCKS_PER_CHUNK = 2
# Not in order, and for the two threads no block twice.
TABLES = ((6, 1, 4, 7), (0, 5, 3, 2))
# A block of a layer fills one buffer, so that a transfer uses each more than once.
BUFFER_BYTES = 2 * 2 * 4 * 8 * 2


class Machine:
    """A paged KV cache on the last NPU, and the forward that writes it."""

    def __init__(self, seed: int) -> None:
        self.case = Case(
            LAYOUTS[seed % len(LAYOUTS)],
            num_layers=3,
            num_blocks=8,
            dtype=DTYPES[seed % len(DTYPES)],
        )
        self.device = torch.device("rbln", torch.rbln.device_count() - 1)
        self.compute = torch.rbln.Stream(self.device)
        self.layers = [
            upload(values, str(self.device)) for values in self.contents(seed)
        ]
        self._computed: list[torch.Tensor] = []

    def contents(self, seed: int) -> list[torch.Tensor]:
        """Return random bits for all layers."""
        return [
            random_bits(self.case.layer_shape, self.case.dtype, 31 * seed + layer)
            for layer in range(self.case.num_layers)
        ]

    def chunks(self, seed: int) -> list[torch.Tensor]:
        """Return random bits for the chunks of one table."""
        shape = self.case.chunk_shape(BLOCKS_PER_CHUNK * self.case.block_size)
        count = len(TABLES[0]) // BLOCKS_PER_CHUNK
        return [
            random_bits(shape, self.case.dtype, 37 * seed + chunk)
            for chunk in range(count)
        ]

    def forward(self, values: list[torch.Tensor]) -> Any:
        """Write all layers, four copies each, and return the event behind them."""
        done = torch.rbln.Event()
        pinned = [layer.pin_memory() for layer in values]
        self._computed += pinned
        with torch.rbln.stream(self.compute):
            for layer, new in zip(self.layers, pinned, strict=True):
                parts = zip(layer.view(-1).chunk(4), new.view(-1).chunk(4), strict=True)
                for part, new_part in parts:
                    part.copy_(new_part, non_blocking=True)
        done.record(self.compute)
        return done

    def move(
        self, to_chunks: bool, chunks: list[torch.Tensor], table: tuple[int, ...]
    ) -> None:
        """Let the backend move the blocks of a table."""
        tokens = BLOCKS_PER_CHUNK * self.case.block_size
        transfer(self.case, to_chunks, self.layers, chunks, list(table), tokens)

    def reference(
        self,
        to_chunks: bool,
        layers: list[torch.Tensor],
        chunks: list[torch.Tensor],
        table: tuple[int, ...],
    ) -> None:
        """Do the same on host tensors, token by token."""
        tokens = BLOCKS_PER_CHUNK * self.case.block_size
        move(self.case, to_chunks, layers, chunks, list(table), tokens)


def backend(bug: Bug | None, seed: int) -> None:
    """Two threads store behind a forward; then blocks are restored behind another."""
    assert bug is None, "the backend makes no mistake on demand"
    # The size of the real ones hides the reuse: everything here would fit one buffer.
    assert staging.BUFFER_BYTES > BUFFER_BYTES
    staging.BUFFER_BYTES = BUFFER_BYTES
    staging._process_arena = staging.StagingArena(2 * len(TABLES), len(TABLES))
    machine = Machine(seed)
    try:
        _store(machine, seed)
        _load(machine, seed)
    except AssertionError as error:
        raise WrongBytesError(str(error)) from error
    finally:
        torch.rbln.synchronize(machine.device)


def _store(machine: Machine, seed: int) -> None:
    values = machine.contents(seed + 1)
    done = machine.forward(values)

    def run(table: tuple[int, ...]) -> None:
        chunks = machine.chunks(seed)
        wanted = [chunk.clone() for chunk in chunks]
        stream = torch.rbln.Stream(machine.device)
        with torch.rbln.stream(stream):
            stream.wait_event(done)
            machine.move(True, chunks, table)
        machine.reference(True, values, wanted, table)
        assert_same_bytes(chunks, wanted)

    with ThreadPoolExecutor(len(TABLES)) as threads:
        list(threads.map(run, TABLES))


def _load(machine: Machine, seed: int) -> None:
    wanted = machine.contents(seed + 2)
    chunks = machine.chunks(seed + 1)
    machine.forward([layer.clone() for layer in wanted])
    with torch.rbln.stream(machine.compute):
        machine.move(False, chunks, TABLES[0])
    machine.reference(False, wanted, chunks, TABLES[0])
    for chunk in chunks:  # the server may reuse its memory now
        as_bytes(chunk).fill_(0)
    torch.rbln.synchronize(machine.device)
    assert_same_bytes(machine.layers, wanted)
