# SPDX-License-Identifier: Apache-2.0
"""The command line of ``python -m lmcache_rbln.diagnose``."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
import argparse
import os
import shutil
import sys

# Local
from lmcache_rbln.diagnose import (
    connector as connectors,
    npu,
    packages,
    report,
    server,
    settings,
)
from lmcache_rbln.diagnose.probe import run_probe
from lmcache_rbln.diagnose.report import FAIL, Result, one_line

# For a server that accepts a connection; one that has the answer gives it at once.
_SERVER_TIMEOUT_S = 5
# Has the probe's LMCache use the CPU: whether RBLN works is the other probe's business.
_BACKEND = "LMCACHE_DEVICE_BACKEND"


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1 << 20:
        raise argparse.ArgumentTypeError(f"1 or more, not {text}")
    return value


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lmcache_rbln.diagnose",
        description="Check whether vLLM on RBLN NPUs can keep its KV cache in LMCache "
        "here. Run it in the environment of the server. It opens no NPU. Exit code: 0 "
        "if nothing failed, else 1.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    for flag, metavar, kind, text in (
        ("--block-size", "N", _count, "vLLM's --block-size, in tokens"),
        ("--kv-transfer-config", "JSON", str, "vLLM's --kv-transfer-config"),
        ("--server", "HOST:PORT", str, "an LMCache server; default: the connector's"),
        ("--timeout", "S", _count, "seconds until a part that hangs is given up"),
    ):
        parser.add_argument(flag, metavar=metavar, type=kind, help=text)
    parser.set_defaults(timeout=60)
    return parser.parse_args(words)


def run_checks(options: argparse.Namespace) -> dict[str, Result]:
    """Gather the facts and check them, in the order of the report."""
    environment, path = dict(os.environ), os.environ.get("PATH")
    connector = connectors.read_connector(options.kv_transfer_config)
    address = options.server or connector.server
    # torch without torch-rbln, which fails to import without a runtime.
    for_lmcache = {n: v for n, v in environment.items() if n != _BACKEND} | {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"
    }
    requests: tuple[dict[str, Any], dict[str, Any]] = (
        {
            "probe": "lmcache",
            "connector": connector.name,
            "extra": connector.extra,
            "block_size": options.block_size,
            "server": address,
            "timeout": min(_SERVER_TIMEOUT_S, options.timeout),
            "environment": {n: v for n, v in environment.items() if n == _BACKEND},
        },
        {"probe": "runtime", "config": connector.config},
    )
    with ThreadPoolExecutor(2) as pool:
        probes = [
            pool.submit(run_probe, request, variables, options.timeout)
            for request, variables in zip(
                requests, (for_lmcache, environment), strict=True
            )
        ]
        monitor, service = npu.ask_monitor(path), npu.rds_service_state(path)
        lmcache, runtime = (probe.result() for probe in probes)
    answer = lmcache.get("server") if address else {}
    found, torch = lmcache.get("settings"), runtime.get("torch")
    # Without torch there is no vLLM either, and that has its own line.
    vllm = None if torch.get("error") else runtime.get("vllm")
    stack = packages.installed()
    checks: dict[str, Callable[[], Result]] = {
        name: lambda name=name: packages.check_package(
            name, stack, bool(torch.get("simulated"))
        )
        for name in packages.STACK
    } | {
        "LMCache build": lambda: packages.check_build(lmcache.get("build")),
        "RBLN runtime": lambda: npu.check_runtime(torch, environment),
        "NPU": lambda: npu.check_npu(torch, monitor, environment),
        "hash seed": lambda: settings.check_hash_seed(environment),
        "settings": lambda: settings.check_settings(found),
        "connector": lambda: connectors.check_connector(connector, vllm),
        "chunk and block": lambda: settings.check_chunk(
            found, answer.get("chunk_size"), bool(address), options.block_size
        ),
        "server": lambda: server.check_server(address, answer),
        "RDS": lambda: npu.check_rds(
            runtime.get("rds"), service, found.get("plugins") or {}
        ),
    }
    return {name: _guarded(check) for name, check in checks.items()}


def _guarded(check: Callable[[], Result]) -> Result:
    """Run a check; an error in it becomes its result."""
    try:
        return check()
    except Exception as error:
        found = one_line(f"the check broke: {type(error).__name__}: {error}")
        fix = "report this with the output of --json"
        return Result(FAIL, found, "a check that ends", fix)


def main(words: Sequence[str] | None = None) -> int:
    """Print the report.

    Args:
        words: The command line; this process's by default.

    Returns:
        The exit code: 0 if no check failed, else 1.
    """
    options = arguments(words)
    results = run_checks(options)
    if options.json:
        text = report.as_json(results)
    else:
        text = report.as_text(results, shutil.get_terminal_size().columns)
    # Arguments and variables may hold bytes that are no characters.
    print(text.encode("utf-8", "backslashreplace").decode())
    return 1 if report.names_of(results, FAIL) else 0


if __name__ == "__main__":
    sys.exit(main())
