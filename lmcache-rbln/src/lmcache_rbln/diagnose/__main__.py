# SPDX-License-Identifier: Apache-2.0
"""The command line of ``python -m lmcache_rbln.diagnose``."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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

_PROBES = "lmcache_rbln.diagnose.probe_main"
# For a server that accepts a connection; one that has the answer gives it at once.
_SERVER_TIMEOUT_S = 5
# Has the probe's LMCache use the CPU: whether RBLN works is the other probe's business.
_BACKEND = "LMCACHE_DEVICE_BACKEND"


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1 << 20:
        raise argparse.ArgumentTypeError(f"1 or more, not {text}")
    return value


def run_checks(options: argparse.Namespace) -> dict[str, Result]:
    """Gather the facts and check them, in the order of the report."""
    environment, path = dict(os.environ), os.environ.get("PATH")
    connector = connectors.read_connector(options.kv_transfer_config)
    url, block_size = options.server or connector.server, options.block_size
    if url and "://" not in url:
        url = f"tcp://{url}"
    asked = {
        "connector": connector.name,
        "config": connector.config,
        "extra": connector.extra,
        "block_size": block_size,
        "server": url,
        "timeout": min(_SERVER_TIMEOUT_S, options.timeout),
        "environment": {n: v for n, v in environment.items() if n == _BACKEND},
    }
    # torch without torch-rbln, which fails to import without a runtime.
    without_rbln = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TORCH_RBLN_DIAGNOSE": "1"}
    for_lmcache = environment | without_rbln
    for_lmcache.pop(_BACKEND, None)
    with ThreadPoolExecutor(2) as pool:
        probes = [
            pool.submit(run_probe, (_PROBES, name), asked, variables, options.timeout)
            for name, variables in (("lmcache", for_lmcache), ("runtime", environment))
        ]
        monitor = npu.ask_monitor(path)
        lmcache, runtime = (probe.result() for probe in probes)
    answer = lmcache.get("server") if url else {}
    found, torch = lmcache.get("settings"), runtime.get("torch")
    # Without torch there is no vLLM either, and that has its own line.
    vllm = None if torch.get("error") else runtime.get("vllm")
    stack, simulated = packages.installed(), bool(torch.get("simulated"))
    checks: dict[str, Callable[[], Result]] = {
        name: partial(packages.check_package, name, stack, simulated)
        for name in packages.STACK
    }
    checks |= {
        "LMCache build": lambda: packages.check_build(lmcache.get("build")),
        "RBLN runtime": lambda: npu.check_runtime(torch, environment),
        "NPU": lambda: npu.check_npu(torch, monitor, environment),
        "hash seed": lambda: settings.check_hash_seed(
            environment, connector.name, bool(url)
        ),
        "settings": lambda: settings.check_settings(found),
        "connector": lambda: connectors.check_connector(connector, vllm),
        "chunk and block": lambda: settings.check_chunk(
            found, answer.get("chunk_size"), bool(url), block_size
        ),
        "server": lambda: server.check_server(url, answer),
        "RDS": lambda: npu.check_rds(runtime.get("rds"), found.get("plugins") or {}),
    }
    results = {}
    for name, check in checks.items():
        try:
            results[name] = check()
        except Exception as error:
            text = one_line(f"the check broke: {type(error).__name__}: {error}")
            fix = "report this with the output of --json"
            results[name] = Result(FAIL, text, "a check that ends", fix)
    return results


def main(words: Sequence[str] | None = None) -> int:
    """Print the report.

    Args:
        words: The command line; this process's by default.

    Returns:
        The exit code: 0 if no check failed, else 1.
    """
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
    options = parser.parse_args(words)
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
