# SPDX-License-Identifier: Apache-2.0
"""The command line of ``python -m lmcache_rbln.diagnose``."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
import argparse
import os
import shutil
import sys

# Local
from lmcache_rbln.diagnose import report
from lmcache_rbln.diagnose.connector import (
    WITH_SERVER,
    check_connector,
    read_connector,
)
from lmcache_rbln.diagnose.npu import check_npu, check_runtime, read_monitor
from lmcache_rbln.diagnose.packages import (
    STACK,
    check_build,
    check_package,
    installed,
)
from lmcache_rbln.diagnose.probe import run_probe
from lmcache_rbln.diagnose.rds import check_rds, service_state
from lmcache_rbln.diagnose.result import Result, fail, one_line
from lmcache_rbln.diagnose.server import check_server, server_url
from lmcache_rbln.diagnose.settings import check_chunk, check_hash_seed, check_settings

# For a server that accepts a connection; one that has the answer gives it at once.
_SERVER_TIMEOUT_S = 5.0
# Above it, waiting is no use.
_LONGEST_S = 3600.0
# Has the probe's LMCache use the CPU: whether RBLN works is the other probe's business.
_BACKEND = "LMCACHE_DEVICE_BACKEND"


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= _LONGEST_S:  # nan is neither
        raise argparse.ArgumentTypeError(
            f"more than 0 and at most {_LONGEST_S:g} seconds, not {text}"
        )
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
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
    parser.add_argument(
        "--block-size", type=_count, metavar="N", help="vLLM's --block-size, in tokens"
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=_count,
        metavar="N",
        help="vLLM's --tensor-parallel-size",
    )
    parser.add_argument(
        "--kv-transfer-config", metavar="JSON", help="vLLM's --kv-transfer-config"
    )
    parser.add_argument(
        "--server",
        metavar="HOST:PORT",
        help="an LMCache server to check; that of --kv-transfer-config by default",
    )
    parser.add_argument(
        "--http", metavar="URL", help="the HTTP port of that server, to ask it directly"
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="seconds after which a part that hangs is given up (default: 60)",
    )
    return parser.parse_args(words)


def run_checks(options: argparse.Namespace) -> list[Result]:
    """Gather the facts and check them, in the order of the report."""
    environment = dict(os.environ)
    connector = read_connector(options.kv_transfer_config)
    server = options.server or connector.server
    url = server_url(server) if server else None
    # torch without torch-rbln, which fails to import without a runtime.
    for_lmcache = {n: v for n, v in environment.items() if n != _BACKEND} | {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCH_RBLN_DIAGNOSE": "1",
    }
    request = {
        "connector": connector.name,
        "extra": connector.extra,
        "vllm": {
            "block_size": options.block_size,
            "world_size": options.tensor_parallel_size,
        },
        "server": url,
        "http": options.http,
        "timeout": min(_SERVER_TIMEOUT_S, options.timeout),
        "environment": {n: v for n, v in environment.items() if n == _BACKEND},
    }
    with ThreadPoolExecutor(2) as pool:
        probes = [
            pool.submit(
                run_probe,
                f"lmcache_rbln.diagnose.probe_{name}",
                asked,
                variables,
                options.timeout,
            )
            for name, asked, variables in (
                ("lmcache", request, for_lmcache),
                ("runtime", connector.config, environment),
            )
        ]
        monitor = read_monitor(environment.get("PATH"))
        service = service_state(environment.get("PATH"))
        lmcache, runtime = (probe.result() for probe in probes)
    answer: Mapping[str, Any] = lmcache.get("server") if url else {}
    http: Mapping[str, Any] = lmcache.get("http") if options.http else {}
    settings = lmcache.get("settings")
    library, torch = runtime.get("library"), runtime.get("torch")
    # Without torch there is no vLLM either, and that has its own line.
    vllm = None if torch.get("error") else runtime.get("vllm")
    simulated = bool(library.get("simulated"))
    packages = {name: installed(name) for name in STACK}
    uses_server = bool(url or options.http or connector.name == WITH_SERVER)
    server_chunk = answer.get("chunk_size") or http.get("chunk_size")

    checks: list[tuple[str, Callable[[], Result]]] = [
        (name, lambda name=name: check_package(name, packages, simulated))  # type: ignore[misc]
        for name in STACK
    ]
    checks += [
        ("LMCache build", lambda: check_build(lmcache.get("build"))),
        ("RBLN runtime", lambda: check_runtime(library, torch, environment)),
        ("NPU", lambda: check_npu(torch, simulated, monitor, environment)),
        ("hash seed", lambda: check_hash_seed(environment)),
        ("settings", lambda: check_settings(settings)),
        ("connector", lambda: check_connector(connector, vllm)),
        (
            "chunk and block",
            lambda: check_chunk(
                settings, server_chunk, uses_server, options.block_size
            ),
        ),
        ("server", lambda: check_server(url, answer, options.http, http)),
        (
            "RDS",
            lambda: check_rds(
                runtime.get("rds"), service, settings.get("plugins") or {}
            ),
        ),
    ]
    return [guarded(name, check) for name, check in checks]


def guarded(name: str, check: Callable[[], Result]) -> Result:
    """Run a check; an error in it becomes its result."""
    try:
        return check()
    except Exception as error:
        return _broken(name, error)


def _broken(name: str, error: Exception) -> Result:
    return fail(
        name,
        one_line(f"the check broke: {type(error).__name__}: {error}"),
        "a check that ends",
        "report this with the output of --json",
    )


def main(words: Sequence[str] | None = None) -> int:
    """Print the report.

    Args:
        words: The command line; this process's by default.

    Returns:
        The exit code: 0 if no check failed, else 1.
    """
    options = arguments(words)
    try:
        results = run_checks(options)
    except Exception as error:
        results = [_broken("diagnose", error)]
    if options.json:
        text = report.as_json(results)
    else:
        text = report.as_text(results, shutil.get_terminal_size().columns)
    # Arguments and variables may hold bytes that are no characters.
    print(text.encode("utf-8", "backslashreplace").decode())
    return 0 if report.is_well(results) else 1


if __name__ == "__main__":
    sys.exit(main())
