# SPDX-License-Identifier: Apache-2.0
"""Probe of the NPU runtime: its library, torch with torch-rbln, vLLM, and RDS.

Nothing here opens an NPU: counting does not, and neither does loading. Usage: ``python
-m lmcache_rbln.diagnose.probe_runtime``, with vLLM's ``--kv-transfer-config`` (or null)
as JSON on standard input.
"""

# Future
from __future__ import annotations

# Standard
from pathlib import Path
from types import ModuleType
from typing import Any
import ctypes
import importlib.util
import json
import os
import sys

# Local
from lmcache_rbln.diagnose.connector import IN_PROCESS
from lmcache_rbln.diagnose.probe import guard, tell
from lmcache_rbln.diagnose.result import one_line

# The simulator of this project exports it for its own check of its settings.
_SIMULATOR_SYMBOL = "rbln_sim_check"


def _explain(error: BaseException) -> str:
    # torch-rbln's messages say the cause first and then where it looked.
    return one_line(str(error).split(" Tried (in order)")[0] or type(error).__name__)


def _load(name: str) -> ModuleType:
    """Load a module of torch-rbln from its file: importing the package loads torch."""
    spec = importlib.util.find_spec("torch_rbln")
    if spec is None or not spec.origin:
        raise ModuleNotFoundError("torch-rbln is not installed")
    path = Path(spec.origin).parent / "_internal" / f"{name}.py"
    file_spec = importlib.util.spec_from_file_location(f"_diagnose_{name}", path)
    if file_spec is None or file_spec.loader is None or not path.is_file():
        raise ModuleNotFoundError(f"this torch-rbln has no {path.name}")
    module = importlib.util.module_from_spec(file_spec)
    file_spec.loader.exec_module(module)
    return module


def _tell_library() -> None:
    """Find librbln.so and compare its ABI with the one torch-rbln was built for."""
    try:
        path, source = _load("rbln_runtime_lib").resolve_runtime_library()
    except Exception as error:
        tell("library", error=_explain(error))
        return
    facts: dict[str, Any] = {"path": path, "source": source}
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        tell("library", error=_explain(error), **facts)
        return
    facts["simulated"] = hasattr(library, _SIMULATOR_SYMBOL)
    try:
        abi = _load("abi_check")
        facts["built_abi"] = _load("_abi_snapshot").BUILT_ABI
        window = abi.read_runtime_abi(library)
        facts["abi"] = window
        if window and facts["built_abi"]:
            facts["abi_problem"] = abi.abi_mismatch_reason(facts["built_abi"], *window)
    except Exception as error:
        facts["abi_unread"] = _explain(error)
    tell("library", **facts)


def _tell_torch() -> None:
    """Import torch as a server would, and count the NPUs."""
    try:
        # Third Party
        import torch
    except Exception as error:
        tell("torch", error=_explain(error))
        return
    rbln = getattr(torch, "rbln", None)
    if rbln is None:
        tell("torch", error="torch did not load torch-rbln")
        return
    # Where there is no NPU, or a setting is malformed, some of these raise.
    facts: dict[str, Any] = {}
    for topic, count in (
        ("available", rbln.is_available),
        ("logical", rbln.device_count),
        ("physical", rbln.physical_device_count),
    ):
        try:
            facts[topic] = int(count())
        except Exception as error:
            facts["reason"] = _explain(error)
    tell("torch", **facts)


def _tell_rds() -> None:
    """Ask the vendor's direct storage for its devices."""
    # Third Party
    from rebel import rds

    tell(
        "rds",
        available=bool(rds.is_available()),
        devices=int(rds.query_available_device_count()),
    )


def _tell_vllm(config: dict[str, Any] | None) -> None:
    """Have vLLM read its ``--kv-transfer-config``, and load the connector."""
    # Third Party
    from vllm.config import KVTransferConfig

    if config is None:
        tell("vllm")
        return
    try:
        KVTransferConfig(**config)
    except Exception as error:
        # What pydantic says quotes the value.
        details = getattr(error, "errors", None)
        if callable(details):
            said = [
                f"{'.'.join(str(part) for part in entry['loc'])}: {entry['msg']}"
                for entry in details(include_input=False, include_url=False)
            ]
            tell("vllm", refused="; ".join(said))
        else:
            tell("vllm", refused=_explain(error))
        return
    name, module = config.get("kv_connector"), config.get("kv_connector_module_path")
    if name == IN_PROCESS and not module:
        module = "lmcache_rbln.integration.vllm.connector"
    if module:
        try:
            getattr(importlib.import_module(module), str(name))
        except Exception as error:
            tell("vllm", unloadable=f"{type(error).__name__}: {_explain(error)}")
            return
    tell("vllm")


def main() -> None:
    """Tell all, the safest first; torch-rbln's clean-up at exit is not waited for."""
    config = json.load(sys.stdin)
    guard("library", _tell_library)
    guard("torch", _tell_torch)
    guard("rds", _tell_rds)
    guard("vllm", _tell_vllm, config)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
