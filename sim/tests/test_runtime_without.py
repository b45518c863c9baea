# SPDX-License-Identifier: Apache-2.0
"""torch-rbln without features that older releases lack (RBLN_SIM_WITHOUT)."""

# Standard
from collections.abc import Callable
from pathlib import Path
import os
import subprocess

# Third Party
import pytest

RunPython = Callable[..., subprocess.CompletedProcess[str]]
pytestmark = pytest.mark.sim

LOOK = """
import torch
print([hasattr(torch.rbln, name) for name in ("Stream", "Event", "stream",
    "current_stream", "default_stream", "set_stream")])
try:
    print(torch.empty(4, pin_memory=True).is_pinned())
except RuntimeError as error:
    print(error)
print(torch.ones(4).to("rbln").cpu().sum().item())
"""
PINNED = "Need to provide pin_memory allocator to use pin memory."


@pytest.mark.parametrize(
    ("without", "streams", "pinned"),
    [
        ("", True, "True"),
        ("streams", False, "True"),
        ("pinned", True, PINNED),
        ("streams,pinned", False, PINNED),
    ],
)
@pytest.mark.parametrize("activated", [False, True])
def test_features_are_missing(
    rbln_sim_run: RunPython, activated: bool, without: str, streams: bool, pinned: str
) -> None:
    first = f"import os, rbln_sim; os.environ['RBLN_SIM_WITHOUT'] = {without!r}\n"
    if activated:
        done = rbln_sim_run(f"{first}rbln_sim.activate()\n{LOOK}")
    else:
        done = rbln_sim_run(LOOK, RBLN_SIM_WITHOUT=without)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str([streams] * 6), pinned, "4.0"]


def test_every_way_to_pinned_memory_is_closed(rbln_sim_run: RunPython) -> None:
    code = """
    import torch, torch.utils.data
    for make in (
        lambda: torch.zeros(4, pin_memory=True),
        lambda: torch.empty_like(torch.ones(4), pin_memory=True),
        lambda: torch.tensor([1], pin_memory=True),
        lambda: torch.ones(4).pin_memory(),
        lambda: torch.ones(4).new_empty(4, pin_memory=True),
        lambda: torch.ones(4).untyped_storage().pin_memory(),
        lambda: torch.ones(4).storage().pin_memory(),
        lambda: torch.utils.data._utils.pin_memory.pin_memory([torch.ones(4)]),
    ):
        try:
            make()
        except RuntimeError as error:
            print(error)
    """
    done = rbln_sim_run(code, RBLN_SIM_WITHOUT="pinned")
    assert done.stdout.splitlines() == [PINNED] * 8, done.stderr


def test_everything_that_takes_pin_memory_is_covered(rbln_sim_run: RunPython) -> None:
    code = """
    import torch
    found = 0
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        if not any(argument.name == "pin_memory" for argument in schema.arguments):
            continue
        # Tensor.to has a schema with pin_memory, but no such argument in Python.
        if name == "to" or name.startswith("_"):
            continue
        for owner in (torch, torch.Tensor):
            if make := getattr(owner, name, None):
                found += 1
                if make.__globals__["__name__"] != "rbln_sim_older":
                    print(owner, name)
    print(found > 40)
    """
    done = rbln_sim_run(code, RBLN_SIM_WITHOUT="pinned")
    assert done.stdout == "True\n", done.stdout + done.stderr


def test_an_unknown_feature_is_named(rbln_sim_run: RunPython) -> None:
    done = rbln_sim_run("import torch", RBLN_SIM_WITHOUT="streams,graphs")
    assert "RBLN_SIM_WITHOUT: graphs is neither" in done.stderr


def test_another_sitecustomize_still_runs(
    rbln_sim_run: RunPython, rbln_sim_environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine', __name__)\n")
    path = f"{rbln_sim_environment['PYTHONPATH']}{os.pathsep}{tmp_path}"
    done = rbln_sim_run(LOOK, RBLN_SIM_WITHOUT="streams", PYTHONPATH=path)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["mine sitecustomize", str([False] * 6)], done.stderr


# LMCache's view, and transfers of the backend in both directions against the reference.
BACKEND = """
import torch
from kv_reference import Case, assert_same_bytes, move, random_bits, upload
from lmcache.lmcache_native import TransferDirection
from lmcache.v1.multiprocess.transfer_context import worker_transfer
from lmcache.v1.platform.devices.rbln.device_ops import RblnDeviceOps

print(worker_transfer._supports_async_primitives())
case = Case("blocks_first")
block_ids, chunk_tokens = [3, 1], 2 * case.block_size
layers = [random_bits(case.layer_shape, case.dtype, i) for i in range(2)]
chunks = [random_bits(case.chunk_shape(chunk_tokens), case.dtype, 9)]
for direction in (TransferDirection.D2H, TransferDirection.H2D):
    on_device = [upload(layer, "rbln") for layer in layers]
    got = [chunk.clone() for chunk in chunks]
    move(case, direction == TransferDirection.D2H, layers, chunks, block_ids,
         chunk_tokens, 0)
    RblnDeviceOps().multi_layer_block_kv_transfer(
        on_device, got, block_ids, on_device[0].device, direction,
        case.shape_desc(), chunk_tokens, case.engine_kv_format, 0)
    assert_same_bytes(got, chunks)
    assert_same_bytes(on_device, layers)
    chunks = [random_bits(case.chunk_shape(chunk_tokens), case.dtype, 10)]
print("equal")
"""


@pytest.mark.parametrize("without", ["streams", "pinned", "streams,pinned"])
def test_the_backend_works_and_warns_once(
    rbln_sim_run: RunPython, rbln_sim_environment: dict[str, str], without: str
) -> None:
    support = Path(__file__).parents[2] / "tests" / "support"
    path = f"{rbln_sim_environment['PYTHONPATH']}{os.pathsep}{support}"
    done = rbln_sim_run(BACKEND, RBLN_SIM_WITHOUT=without, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stdout.splitlines() if line in ("False", "equal")]
    assert printed == ["False", "equal"]
    assert (done.stdout + done.stderr).count("RBLN KV copies run synchronously") == 1
