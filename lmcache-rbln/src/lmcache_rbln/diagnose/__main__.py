# SPDX-License-Identifier: Apache-2.0
"""The command line of ``python -m lmcache_rbln.diagnose``."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
import argparse
import json
import os
import shutil
import sys

# Local
from lmcache_rbln.diagnose import report
from lmcache_rbln.diagnose.connector import (
    WITH_SERVER,
    Connector,
    check_chunk,
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
from lmcache_rbln.diagnose.probe import Facts, run_probe
from lmcache_rbln.diagnose.rds import check_rds, service_state
from lmcache_rbln.diagnose.result import Result, fail, one_line
from lmcache_rbln.diagnose.server import (
    ask_http,
    check_server,
    connection_problem,
    server_url,
)
from lmcache_rbln.diagnose.settings import check_hash_seed, check_settings

# For a server that accepts a connection; one that has the answer gives it at once.
_SERVER_TIMEOUT_S = 5.0


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
        "--block-size", type=int, metavar="N", help="vLLM's --block-size, in tokens"
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
        type=float,
        default=60.0,
        metavar="S",
        help="seconds after which a part that hangs is given up (default: 60)",
    )
    return parser.parse_args(words)


def ask_lmcache(
    connector: Connector, url: str | None, modes: bool, timeout_s: float
) -> Facts:
    """Run the LMCache probe in an environment where it can't fail for RBLN's sake."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "LMCACHE_DEVICE_BACKEND"
    }
    # torch without torch-rbln, which fails to import without a runtime; whether it
    # works is the other probe's business.
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    environment["TORCH_RBLN_DIAGNOSE"] = "1"
    request = {
        "connector_config": dict(connector.extra),
        "server": url,
        "modes": modes,
        "timeout": min(_SERVER_TIMEOUT_S, timeout_s),
    }
    return run_probe(
        "lmcache_rbln.diagnose.probe_lmcache",
        [json.dumps(request)],
        environment,
        timeout_s,
    )


def run_checks(options: argparse.Namespace) -> list[Result]:
    """Gather the facts and check them, in the order of the report."""
    environment = dict(os.environ)
    connector = read_connector(options.kv_transfer_config)
    server = options.server or connector.server
    url = server_url(server) if server else None
    unreachable = connection_problem(url, _SERVER_TIMEOUT_S) if url else ""
    http: dict[str, Any] = {}
    if options.http:
        http = ask_http(options.http, _SERVER_TIMEOUT_S)
    with ThreadPoolExecutor(2) as pool:
        lmcache_probe = pool.submit(
            ask_lmcache,
            connector,
            None if unreachable else url,
            not http.get("mode"),
            options.timeout,
        )
        runtime_probe = pool.submit(
            run_probe,
            "lmcache_rbln.diagnose.probe_runtime",
            [],
            environment,
            options.timeout,
        )
        monitor = read_monitor(environment.get("PATH"))
        service = service_state(environment.get("PATH"))
        lmcache, runtime = lmcache_probe.result(), runtime_probe.result()
    answer: Mapping[str, Any] = {}
    if url:
        answer = {"error": unreachable} if unreachable else lmcache.get("server")
    settings = lmcache.get("settings")
    library, torch = runtime.get("library"), runtime.get("torch")
    simulated = bool(library.get("simulated"))
    packages = {name: installed(name) for name in STACK}
    chunk, source = settings.get("chunk_size"), "LMCACHE_CHUNK_SIZE"
    if url or options.http or connector.name == WITH_SERVER:
        chunk, source = answer.get("chunk_size") or http.get("chunk_size"), "server"

    checks: list[tuple[str, Callable[[], Result]]] = [
        (name, lambda name=name: check_package(name, packages, simulated))  # type: ignore[misc]
        for name in STACK
    ]
    checks += [
        ("LMCache build", lambda: check_build(lmcache.get("build"))),
        ("RBLN runtime", lambda: check_runtime(library, torch, environment)),
        ("NPU", lambda: check_npu(torch, simulated, monitor, environment)),
        ("hash seed", lambda: check_hash_seed(environment)),
        ("settings", lambda: check_settings(settings, environment)),
        ("connector", lambda: check_connector(connector)),
        ("chunk and block", lambda: check_chunk(chunk, source, options.block_size)),
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
    results = run_checks(options)
    if options.json:
        print(report.as_json(results))
    else:
        print(report.as_text(results, shutil.get_terminal_size().columns))
    return 0 if report.is_well(results) else 1


if __name__ == "__main__":
    sys.exit(main())
