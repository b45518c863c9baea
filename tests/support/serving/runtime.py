# SPDX-License-Identifier: Apache-2.0
"""Which NPU the servers see: the real one, or the simulated one."""

# Standard
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
import os

# The distribution that brings the real librbln.so; without it there is no NPU.
NPU_STACK = "rebel-compiler"
WANTED = ("auto", "sim", "npu")


@dataclass(frozen=True)
class Runtime:
    """What the servers run on.

    Attributes:
        name: For people: ``NPU`` or ``SIMULATED NPU`` with its version.
        simulated: Whether it is the simulator.
        env: Environment for every process that may import torch.
    """

    name: str
    simulated: bool
    env: dict[str, str]


def find_runtime(
    base: Mapping[str, str] | None = None, wanted: str = "auto"
) -> Runtime:
    """Choose the NPU where its stack is installed, else the simulator.

    Args:
        base: Environment to start from; the one of this process by default.
        wanted: ``npu`` or ``sim`` insists on one of them.

    Returns:
        The runtime and the environment that leads to it.

    Raises:
        RuntimeError: If neither is installed, or not the wanted one.
    """
    if wanted not in WANTED:
        raise RuntimeError(f"runtime must be one of {WANTED}, got {wanted!r}")
    env = dict(os.environ if base is None else base)
    version = _version(NPU_STACK)
    if wanted == "npu" and version is None:
        raise RuntimeError(
            f"runtime npu: {NPU_STACK} is not installed in this environment"
        )
    if version is not None and wanted != "sim":
        return Runtime(f"NPU ({NPU_STACK} {version})", False, env)
    try:
        # Third Party
        import rbln_sim
    except ImportError as error:
        raise RuntimeError(
            f"neither {NPU_STACK} (a real NPU's stack) nor rbln-sim (the simulator) "
            "is installed in this environment; `make demo` sets the simulator up"
        ) from error
    name = f"SIMULATED NPU (rbln-sim {_version('rbln-sim') or 'from its source'})"
    return Runtime(name, True, rbln_sim.environment(env))


def own_machine(folder: Path, devices: int = 1) -> dict[str, str]:
    """Settings of a simulated machine that shares no NPU with any other.

    Args:
        folder: Where its state and its log of opened NPUs go; made when missing.
        devices: Number of NPUs.

    Returns:
        Environment variables, without effect on a real NPU.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "RBLN_SIM_STATE_DIR": str(folder / "npu-state"),
        "RBLN_SIM_OPEN_LOG": str(folder / "npu-opens.jsonl"),
        "RBLN_SIM_DEVICES": str(devices),
    }


def serving_environment(
    runtime: Runtime, cache_dir: Path, backend: str | None = "rbln"
) -> dict[str, str]:
    """Environment of ``lmcache server`` and ``vllm serve``.

    Args:
        runtime: Where the servers run.
        cache_dir: Where vLLM may keep compiled graphs between runs.
        backend: Value of ``LMCACHE_DEVICE_BACKEND``; ``None`` leaves the choice
            to LMCache.

    Returns:
        A new environment.
    """
    env = {
        **runtime.env,
        # Everything is local: no model hub, no usage reports.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CACHE_ROOT": str(cache_dir / "vllm"),
        "VLLM_CONFIG_ROOT": str(cache_dir / "vllm-config"),
        "PYTHONUNBUFFERED": "1",
    }
    if runtime.simulated:
        # The copy engine of a simulated NPU is a thread: torch's own threads must not
        # take every core from it.
        cores = len(os.sched_getaffinity(0))
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores // 2)))
    env.pop("LMCACHE_DEVICE_BACKEND", None)
    if backend is not None:
        env["LMCACHE_DEVICE_BACKEND"] = backend
    return env


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
