# SPDX-License-Identifier: Apache-2.0
"""The documented launch with one thing changed: it does not start, and says why."""

# Standard
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
import json

# Third Party
import pytest

# First Party
from tests.e2e.inprocess.engines import EnginePool
from tests.e2e.messages import assert_logged, assert_logged_last
from tests.e2e.serving import serving_environment
from tests.e2e.starts import Ended, Starts
from tests.support.documents import EXTENSION_PAGE, RDS_PAGE, launch
from tests.support.serving import tiny_models
from tests.support.serving.runtime import Runtime, own_machine
from tests.support.serving.servers import HOST, free_port

pytestmark = pytest.mark.sim
# As far as vllm-rbln asks it about a model that has not been compiled.
OPTIMUM_RBLN = """
class _Model:
    _supports_non_fp32 = True

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Model
"""


class Launch:
    """The documented launch of a tiny model.

    Args:
        runtime: The simulator.
        folder: For the models and logs.
    """

    def __init__(self, runtime: Runtime, folder: Path) -> None:
        size = tiny_models.Size(max_positions=8192)
        self.model = tiny_models.make("qwen3", folder / "models", size=size)
        env = serving_environment(runtime, folder / "cache", None)
        env |= own_machine(folder)
        env["OMP_NUM_THREADS"] = "1"
        self.starts = Starts(env | launch(EXTENSION_PAGE).env, folder)

    def refused(
        self,
        start: str,
        env: Mapping[str, str | None] = MappingProxyType({}),
        without: tuple[str, ...] = (),
        own_process: bool = False,
    ) -> Ended:
        """Start it with changes, and wait until it has ended.

        Args:
            start: Name of the log.
            env: Changes of the environment; ``None`` takes a variable away.
            without: Arguments to leave out.
            own_process: Whether what vLLM reads at its import is changed.
        """
        [_, *documented] = launch(EXTENSION_PAGE).command("vllm", "serve")
        arguments = [
            str(self.model),
            *(word for word in documented if word not in without),
            *("--host", HOST, "--port", str(free_port())),
        ]
        if own_process:
            ended = self.starts.run(["vllm", "serve", *arguments], env)
        else:
            ended = self.starts.vllm_serve(start, arguments, env)
        # Neither 0, nor a signal: an abort, or the end of one that hung.
        assert ended.status == 1, f"{ended.status}: {ended.log}"
        return ended


@pytest.fixture(scope="module")
def documented(
    runtime: Runtime, tmp_path_factory: pytest.TempPathFactory, engines: EnginePool
) -> Iterator[Launch]:
    engines.stop()  # for the memory of this machine
    made = Launch(runtime, tmp_path_factory.mktemp("refused"))
    yield made
    made.starts.close()


def test_without_the_vllm_model_implementation(documented: Launch) -> None:
    """``auto`` takes optimum-rbln's, of which a stand-in is enough to get so far."""
    optimum = documented.starts.folder / "with-optimum/optimum/rbln"
    optimum.mkdir(parents=True)
    (optimum / "__init__.py").write_text(OPTIMUM_RBLN)
    (optimum / "configuration_utils.py").write_text("class RBLNModelConfig: ...\n")
    path = f"{optimum.parents[1]}:{documented.starts.env['PYTHONPATH']}"
    ended = documented.refused(
        "without-model-impl",
        {"PYTHONPATH": path},
        without=("--model-impl", "vllm"),
        own_process=True,
    )
    assert_logged("without-model-impl", ended.log)


@pytest.mark.parametrize("seed", [None, "", "random"])
def test_without_a_fixed_hash_seed(documented: Launch, seed: str | None) -> None:
    ended = documented.refused("without-hash-seed", {"PYTHONHASHSEED": seed})
    assert_logged_last("without-hash-seed", ended.log)


@pytest.mark.parametrize(
    ("start", "env"),
    [
        ("chunk-is-no-multiple", {"LMCACHE_CHUNK_SIZE": "1000"}),
        ("layer-wise", {"LMCACHE_USE_LAYERWISE": "True"}),
        (
            "misspelt",
            {
                "LMCACHE_MAX_LOCAL_CPU_SIZ": "5",
                "LMCACHE_EXTRA_CONFIG": '{"rds_buffer_size": 64}',
            },
        ),
        ("another-device", {"LMCACHE_DEVICE_BACKEND": "cpu"}),
        ("no-tier", {"LMCACHE_LOCAL_CPU": "False"}),
        ("too-small-a-tier", {"LMCACHE_MAX_LOCAL_CPU_SIZE": "0.0001"}),
    ],
)
def test_a_setting_that_cannot_work(
    documented: Launch, start: str, env: dict[str, str | None]
) -> None:
    assert_logged_last(start, documented.refused(start, env).log)


def test_direct_storage_without_rebel_rds(documented: Launch) -> None:
    blocked = documented.starts.folder / "without-rds"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(
        "import sys\nsys.modules['rebel.rds'] = None\n"
    )
    path = f"{blocked}:{documented.starts.env['PYTHONPATH']}"
    ended = documented.refused(
        "rds-without-rebel-rds",
        launch(RDS_PAGE).env | {"PYTHONPATH": path},
        own_process=True,
    )
    assert_logged_last("rds-without-rebel-rds", ended.log)


@pytest.mark.parametrize(
    ("start", "changes", "env"),
    [
        ("rds-without-service", {}, {"RBLN_SIM_RDS_GIB": "0"}),
        ("rds-too-much-staging", {"rds_buffer_size": 1 << 20}, {}),
        (
            "rds-too-little-staging",
            {"rds_buffer_size": 1},
            {"LMCACHE_CHUNK_SIZE": "8192"},
        ),
        (
            "rds-with-a-cpu-tier",
            {},
            {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": "1"},
        ),
    ],
)
def test_direct_storage_that_cannot_work(
    documented: Launch, start: str, changes: dict[str, object], env: dict[str, str]
) -> None:
    storage = dict(launch(RDS_PAGE).env)
    extra = json.loads(storage["LMCACHE_EXTRA_CONFIG"]) | changes
    storage["LMCACHE_EXTRA_CONFIG"] = json.dumps(extra)
    assert_logged_last(start, documented.refused(start, storage | env).log)
