# SPDX-License-Identifier: Apache-2.0
"""``lmcache server`` where RBLN can't be used: started for real, and what it says."""

# Standard
from collections.abc import Mapping
from pathlib import Path
import os

# Third Party
import pytest
import torch

# First Party
from tests.e2e.messages import assert_logged
from tests.e2e.serving import serving_environment
from tests.e2e.starts import Ended, Starts
from tests.support.serving.runtime import Runtime, own_machine
from tests.support.serving.servers import (
    CacheServer,
    CacheServerConfig,
    ServerFailedError,
    running,
)

pytestmark = pytest.mark.sim

# An environment that torch-rbln is no part of: nothing finds it.
NOT_INSTALLED = """
import sys

class Without:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, *rest):
        if name.partition(".")[0] == "torch_rbln":
            return None
        return self._finder.find_spec(name, *rest)

sys.meta_path = [Without(finder) for finder in sys.meta_path]
"""
# A wheel that was built for another torch.
BUILT_FOR_ANOTHER = """
import sys, types

built_with = types.ModuleType("built_with")
built_with.TORCH_VERSION = "9.9.9"
sys.modules["lmcache.v1.platform.devices.rbln.built_with"] = built_with
"""


@pytest.fixture
def starts(runtime: Runtime, tmp_path: Path) -> Starts:
    env = serving_environment(runtime, tmp_path / "cache") | own_machine(tmp_path)
    return Starts(env, tmp_path)


def start_server(starts: Starts, env: Mapping[str, str | None]) -> Ended:
    command = ["lmcache", "server", "--l1-size-gb", "1", "--eviction-policy", "LRU"]
    return starts.run([*command, "--chunk-size", "256"], env)


@pytest.mark.parametrize(
    ("start", "env"),
    [
        ("server-without-autoload", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
        ("server-without-npu", {"RBLN_SIM_DEVICES": "0"}),
        ("server-without-runtime", {"LD_LIBRARY_PATH": None, "PYTHONPATH": None}),
    ],
)
def test_pinned_it_ends_with_the_reason(
    starts: Starts, start: str, env: dict[str, str | None]
) -> None:
    ended = start_server(starts, env)
    assert ended.status == 1, ended.log
    assert_logged(start, ended.log)


def test_pinned_it_ends_where_torch_rbln_is_not_installed(starts: Starts) -> None:
    (starts.folder / "sitecustomize.py").write_text(NOT_INSTALLED)
    # torch looks for backends by their metadata, which is still there.
    env = {
        "PYTHONPATH": str(starts.folder),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "LD_LIBRARY_PATH": None,
    }
    ended = start_server(starts, env)
    assert ended.status == 1, ended.log
    assert_logged("server-without-torch-rbln", ended.log)


def test_it_ends_where_torch_was_replaced(starts: Starts) -> None:
    (starts.folder / "sitecustomize.py").write_text(BUILT_FOR_ANOTHER)
    path = f"{starts.folder}:{starts.env['PYTHONPATH']}"
    ended = start_server(starts, {"PYTHONPATH": path})
    assert ended.status == 1, ended.log
    assert_logged("server-with-another-torch", ended.log)
    assert f"built for torch 9.9.9, got torch {torch.__version__}" in ended.log


def test_unpinned_it_serves_and_warns(runtime: Runtime, tmp_path: Path) -> None:
    env = serving_environment(runtime, tmp_path / "cache", backend=None)
    env |= own_machine(tmp_path) | {"RBLN_SIM_DEVICES": "0"}
    server = CacheServer(CacheServerConfig(chunk_size=256), env, tmp_path)
    server.start()
    try:
        server.wait_ready()
        assert_logged("unpinned-server-without-npu", server.process.log())
    finally:
        server.stop()


def test_a_running_server_keeps_its_shared_memory(
    runtime: Runtime, tmp_path: Path
) -> None:
    """A second one took it away, and the first one's workers copied from it."""
    env = serving_environment(runtime, tmp_path / "cache") | own_machine(tmp_path)
    config = CacheServerConfig(256, shm_name=f"rbln_refused_{os.getpid()}")
    with running(CacheServer(config, env, tmp_path)) as first:
        assert first.segment is not None
        before = first.segment.stat()
        second = CacheServer(config, env, tmp_path, name="second")
        second.start()
        with pytest.raises(ServerFailedError):
            second.wait_ready()
        assert_logged("server-with-the-memory-of-another", second.process.log())
        assert first.segment.stat() == before
