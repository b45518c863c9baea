# SPDX-License-Identifier: Apache-2.0
"""The adapter: what it asks of ``rebel.rds``, and how failures are told."""

# Standard
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
import errno
import re
import sys

# Third Party
import pytest
import torch

# First Party
from lmcache_rbln.storage_plugin.rds import device as rds_device
from lmcache_rbln.storage_plugin.rds.device import (
    RDSDevice,
    RDSError,
    RDSFullError,
    Region,
    aligned,
)


class FakeRebel:
    """Writes down what it is asked; two buffers per tensor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.error: Exception | None = None
        rebel, native = ModuleType("rebel"), ModuleType("rebel._C")
        rebel.rds = SimpleNamespace(  # type: ignore[attr-defined]
            is_available=lambda: True,
            query_available_device_count=lambda: 1,
            Chunk=self.chunk,
            Stream=self.stream,
            mark_device_updated=lambda address: self.calls.append("mark"),
        )
        native.vmem = SimpleNamespace(  # type: ignore[attr-defined]
            get_device_buffers=lambda address: [
                SimpleNamespace(name="a", size=8192),
                SimpleNamespace(name="b", size=4096),
            ],
            sync_to_device=lambda address: self.calls.append("sync"),
        )
        rebel._C = native  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "rebel", rebel)
        monkeypatch.setitem(sys.modules, "rebel._C", native)
        self.rebel = rebel

    def chunk(self, size: int, device: int) -> Any:
        if self.error is not None:
            raise self.error
        self.calls.append(("chunk", size, device))

        def transfer(name: str) -> Any:
            return lambda buffer, file_offset, stream: self.calls.append(
                (name, buffer.name, file_offset, stream is not None)
            )

        return SimpleNamespace(
            write=transfer("write"),
            read=transfer("read"),
            close=lambda: self.calls.append("close"),
        )

    def stream(self, device: int, node_id: int) -> Any:
        fake = self

        class Stream:
            def __enter__(self) -> None:
                fake.calls.append(("enter", device, node_id))

            def __exit__(self, *error: object) -> None:
                fake.calls.append("exit")
                if fake.error is not None:
                    raise fake.error

        return Stream()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRebel:
    return FakeRebel(monkeypatch)


@pytest.fixture
def tensor() -> torch.Tensor:
    return torch.empty(12288, dtype=torch.uint8)


def test_a_write(fake: FakeRebel, tensor: torch.Tensor) -> None:
    device = RDSDevice(torch.device("rbln:1"), numa_node=3)
    region = device.new_region(16384)
    with device.batch() as batch:
        batch.write(region, 4096, tensor)
    device.release(region)
    assert fake.calls == [
        ("chunk", 16384, 1),
        ("enter", 1, 3),
        "sync",
        ("write", "a", 4096, True),
        ("write", "b", 12288, True),
        "exit",
        "close",
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_read_is_marked_after_the_wait(
    fake: FakeRebel, tensor: torch.Tensor, fails: bool
) -> None:
    device = RDSDevice(torch.device("rbln:0"), numa_node=0)
    region = device.new_region(16384)
    del fake.calls[:]
    fake.error = RuntimeError("broken") if fails else None
    try:
        with device.batch() as batch:
            batch.read(region, 4096, tensor)
    except RDSError as error:
        assert fails and "broken" in str(error)
    assert fake.calls == [
        ("enter", 0, 0),
        ("read", "a", 4096, True),
        ("read", "b", 12288, True),
        "exit",
        "mark",
    ]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "full"), RDSFullError),
        (RuntimeError("No space left on NVMe"), RDSFullError),
        (OSError(errno.EIO, "I/O error"), RDSError),
        (RuntimeError("device lost"), RDSError),
    ],
)
def test_failures_have_two_kinds(
    fake: FakeRebel, tensor: torch.Tensor, error: Exception, kind: type[Exception]
) -> None:
    device = RDSDevice(torch.device("rbln:0"), numa_node=0)
    region = Region(fake.chunk(4096, 0))
    fake.error = error
    with pytest.raises(RDSError) as told:
        device.new_region(4096)
    assert type(told.value) is kind
    with pytest.raises(RDSError) as told, device.batch() as batch:
        batch.write(region, 0, tensor)
    assert type(told.value) is kind


def test_a_failing_release_is_not_told(fake: FakeRebel) -> None:
    device = RDSDevice(torch.device("rbln:0"), numa_node=0)

    def lost() -> None:
        raise RuntimeError("lost")

    device.release(Region(SimpleNamespace(close=lost)))


def test_no_module_and_no_device_are_named(
    fake: FakeRebel, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.rebel.rds.is_available = lambda: False
    with pytest.raises(RDSError, match=r"rebellions-rds-binding\.service"):
        RDSDevice(torch.device("rbln:0"), numa_node=0)
    monkeypatch.delattr(fake.rebel, "rds")
    monkeypatch.delitem(sys.modules, "rebel.rds", raising=False)
    with pytest.raises(RDSError, match=r"rebel\.rds of rebel-compiler"):
        RDSDevice(torch.device("rbln:0"), numa_node=0)


@pytest.mark.parametrize(
    ("nbytes", "up"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)]
)
def test_aligned(nbytes: int, up: int) -> None:
    assert aligned(nbytes) == up


def test_nothing_else_imports_rebel() -> None:
    package = Path(rds_device.__file__).parents[2]
    importing = re.compile(r"(?m)^\s*(?:from|import) rebel\b")
    importers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if importing.search(path.read_text(encoding="utf-8"))
    }
    assert importers == {"storage_plugin/rds/device.py", "diagnose/npu.py"}
