# SPDX-License-Identifier: Apache-2.0
"""What is in the wheel, and what is not."""

from __future__ import annotations

import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.build.workshop import ROOT

DEVICE = "lmcache/v1/platform/devices/rbln"
INFO = "lmcache-0.5.6+rbln.dist-info"


@pytest.fixture(scope="module")
def contents(wheel: Path) -> dict[str, bytes]:
    """The wheel's files by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def requirements(contents: dict[str, bytes]) -> list[Requirement]:
    """The wheel's requirements, those of extras included."""
    headers = HeaderParser().parsestr(contents[f"{INFO}/METADATA"].decode())
    return [Requirement(r) for r in headers.get_all("Requires-Dist", [])]


def test_name_carries_the_local_version(wheel: Path) -> None:
    assert wheel.name.startswith("lmcache-0.5.6+rbln-cp3")
    assert wheel.name.endswith("-linux_x86_64.whl")


def test_device_folder_holds_our_files_and_nothing_of_lmcache(
    contents: dict[str, bytes],
) -> None:
    ours = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for path in (ROOT / DEVICE).rglob("*.py")
    }
    record = f"{DEVICE}/built_with.py"
    shipped = {n: data for n, data in contents.items() if n.startswith(DEVICE)}

    assert ours
    assert b"TORCH_VERSION = '2.13.0+cpu'" in shipped.pop(record)
    assert shipped == ours


def test_every_file_of_ours_below_lmcache_is_shipped(
    contents: dict[str, bytes],
) -> None:
    for path in (ROOT / "lmcache").rglob("*.py"):
        assert contents[path.relative_to(ROOT).as_posix()] == path.read_bytes()


def test_holds_lmcache_and_its_metadata_only(contents: dict[str, bytes]) -> None:
    assert {name.split("/")[0] for name in contents} == {"lmcache", INFO}


def test_holds_the_native_extensions_and_generated_code(
    contents: dict[str, bytes],
) -> None:
    grpc = "lmcache/v1/multiprocess/transport/grpc_impl/_proto_gen"
    natives = {name.split(".")[0] for name in contents if name.endswith(".so")}

    # LMCache's CUDA build, which an nvcc on PATH brings about, has c_ops as well.
    assert natives == {
        "lmcache/kv_transpose",
        *(f"lmcache/lmcache_{n}" for n in ("native", "redis", "fs")),
    }
    assert f"{grpc}/engine_driven_service_pb2_grpc.py" in contents


def test_version_inside_is_that_of_the_name(contents: dict[str, bytes]) -> None:
    assert b"'0.5.6+rbln'" in contents["lmcache/_version.py"]


@pytest.mark.parametrize(
    "name",
    [
        "awscrt",
        "cufile-python",
        "google-cloud-bigtable",
        "grpcio-observability",
        "nvtx",
        "pytest",
    ],
)
def test_does_not_ask_for(name: str, requirements: list[Requirement]) -> None:
    plain = [r for r in requirements if not r.marker or "extra" not in str(r.marker)]
    assert name not in {r.name for r in plain}
    assert "msgspec" in {r.name for r in plain}


def test_keeps_no_cap_on_what_serving_environments_hold(
    requirements: list[Requirement],
) -> None:
    capped = {
        r.name
        for r in requirements
        for s in r.specifier
        if s.operator not in (">=", ">")
    }
    assert capped == set()


def test_offers_the_rest_as_extras(requirements: list[Requirement]) -> None:
    def extra(name: str) -> set[str]:
        return {
            r.name
            for r in requirements
            if r.marker
            and not r.marker.evaluate({"extra": ""})
            and r.marker.evaluate({"extra": name})
        }

    assert extra("s3") == {"awscrt"}
    assert extra("bigtable") == {"google-api-core", "google-cloud-bigtable"}
    assert extra("grpc-metrics") == {"grpcio-observability"}
