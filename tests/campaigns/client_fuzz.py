# SPDX-License-Identifier: Apache-2.0
"""Requests as no client should send them: the engine serves on, and nothing is left.

``python -m tests.campaigns.client_fuzz --connector inprocess --requests 2000`` sends
random ``kv_transfer_params``, sampling settings and cache salts, hangs up at random
moments, and looks at the end whether a pin, lock, lookup or block is left over. It
prints how many requests ended how, and exits with 1 if the engine ended or anything is
left.
"""

# Future
from __future__ import annotations

# Standard
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
import argparse
import http.client
import json
import os
import random
import tempfile
import threading
import time

# First Party
from tests.support.serving import client
from tests.support.serving.runtime import find_runtime
from tests.support.serving.servers import HOST

PROMPTS = 12
NAMES = (
    *(
        "lmcache.tag.u",
        "lmcache.tag.",
        "lmcache.tag.rbln_identity",
        "lmcache.skip_save",
    ),
    *("lmcache.max_offload_tokens", "lmcache.ttl", "disagg_spec", "ret_first_tok"),
    *("cached_token_stats", "do_remote_prefill", "do_remote_decode", "", "x" * 300),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 0.5, "", "a", "true", "a@b%c/d", "\u00e9\n"),
    *([], ["a"], {}, {"receiver_host": 1}, [[[]]], "y" * 3000),
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connector", choices=("inprocess", "mp"), default="inprocess")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--prompt-logprobs",
        action="store_true",
        help="ask for these too; today they end the engine on the simulator",
    )
    parser.add_argument("--folder", type=Path, help="keep logs here")
    return parser.parse_args(arguments)


def body_of(chance: random.Random, prompt_logprobs: bool) -> dict[str, Any]:
    """Make a request."""
    which = random.Random(chance.randrange(PROMPTS))
    length = which.choice((20, 128, 255, 256, 257, 300, 512, 600))
    body: dict[str, Any] = {
        "model": "rbln-demo",
        "prompt": [which.randrange(3, 512) for _ in range(length)],
        "max_tokens": chance.randint(1, 12),
        "ignore_eos": True,
        "stream": chance.random() < 0.5,
    }
    odd = {
        "n": lambda: 3,
        "logprobs": lambda: chance.choice((0, 1, 5)),
        "priority": lambda: chance.choice((-5, 0, 7)),
        "temperature": lambda: chance.choice((0, 0.5, 2)),
        "seed": lambda: 1,
        "cache_salt": lambda: chance.choice(("A", "B", "a@b", "")),
        "echo": lambda: False,
        "stop_token_ids": lambda: [5, 6],
        "max_tokens": lambda: chance.choice((1, 60)),
        "kv_transfer_params": lambda: {
            chance.choice(NAMES): chance.choice(VALUES)
            for _ in range(chance.randint(1, 4))
        },
        "vllm_xargs": lambda: {
            "kv_transfer_params": chance.choice((5, "ret_first_tok"))
        },
    }
    if prompt_logprobs:
        odd["prompt_logprobs"] = lambda: 1
    for name in chance.sample(sorted(odd), chance.randint(0, 4)):
        body[name] = odd[name]()
    if chance.random() < 0.3:
        body["kv_transfer_params"] = odd["kv_transfer_params"]()
    return body


def send(port: int, seed: object, prompt_logprobs: bool) -> str:
    """Send a request, perhaps hang up; returns how it ended."""
    chance = random.Random(repr(seed))
    body = json.dumps(body_of(chance, prompt_logprobs))
    connection = http.client.HTTPConnection(HOST, port, timeout=600)
    hang_up = chance.choice((None, None, "at once", "later", "at the first token"))
    try:
        connection.request(
            "POST", "/v1/completions", body, {"Content-Type": "application/json"}
        )
        if hang_up in ("at once", "later"):
            if hang_up == "later":
                time.sleep(chance.random() * 2)
            return f"hung up {hang_up}"
        response = connection.getresponse()
        if hang_up is not None:
            response.read(1)
            return f"hung up {hang_up}"
        response.read()
        return f"HTTP {response.status}"
    except (OSError, http.client.HTTPException) as error:
        return f"lost: {type(error).__name__}"
    finally:
        with suppress(OSError):
            connection.close()


def send_all(port: int, options: argparse.Namespace) -> Counter[str]:
    """Send all requests; stops early when the engine is gone."""
    gone = threading.Event()
    done: Counter[str] = Counter()

    def one(number: int) -> None:
        if gone.is_set():
            return
        ended = send(port, (options.seed, number), options.prompt_logprobs)
        done[ended] += 1
        if ended.startswith("lost") and not client.answers(
            f"http://{HOST}:{port}/health", 60
        ):
            gone.set()
        if number % 100 == 99:
            print(f"{number + 1}: {dict(done)}", flush=True)

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(one, range(options.requests)))
    return done


def wait_idle(engine: Any) -> None:
    """Wait until no request is in the engine and no block is taken."""
    # First Party
    from tests.e2e.stack import wait_until

    def idle() -> bool:
        engine.process.check_running()
        counters = engine.counters()
        return not sum(
            counters.total(f"vllm:{name}")
            for name in (
                *("num_requests_running", "num_requests_waiting"),
                "kv_cache_usage_perc",
            )
        )

    wait_until(idle, "no request and no block is left in the engine", 600)


def fuzz_in_process(options: argparse.Namespace) -> Counter[str]:
    """On an engine with LMCache in process."""
    # First Party
    from tests.e2e.inprocess.engines import CONFIGS, InProcessEngine

    engine = InProcessEngine(CONFIGS["small"], find_runtime(), options.folder)
    try:
        engine.start()
        done = send_all(engine.engine.port, options)
        wait_idle(engine.engine)
        # A step writes the state down, what was aborted is released by the next one.
        engine.ask(engine.prompt(20, "last"), new_tokens=2)
        state = engine.state()
        left = {name: state[name] for name in ("pinned", "referenced", "lookups")}
        assert not any(left.values()), left
        return done
    finally:
        engine.stop()


def fuzz_server(options: argparse.Namespace) -> Counter[str]:
    """On an engine with an LMCache server."""
    # First Party
    from tests.e2e.stack import Stack, wait_until
    from tests.e2e.stack_pool import STACKS

    stack = Stack(
        STACKS["blocks-first"],
        find_runtime(),
        options.folder,
        shm_name=f"fuzz_{os.getpid()}",
    )
    try:
        stack.start()
        done = send_all(stack.engine.port, options)
        wait_idle(stack.engine)

        def unlocked() -> bool:
            held = stack.cache.memory()
            return not held["write_locked_count"] + held["read_locked_count"]

        wait_until(unlocked, "no lock is left on the server", 600)
        return done
    finally:
        stack.stop()


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign; returns the exit code."""
    options = parse(arguments)
    if find_runtime().simulated:
        # Third Party
        import rbln_sim

        # What the end-to-end tests share imports torch, which wants an NPU's runtime.
        rbln_sim.activate()
    run = fuzz_in_process if options.connector == "inprocess" else fuzz_server
    if options.folder is None:
        with tempfile.TemporaryDirectory(prefix="client-fuzz-") as folder:
            options.folder = Path(folder) / "engine"
            done = run(options)
    else:
        done = run(options)
    print(f"{sum(done.values())} requests: {dict(sorted(done.items()))}")
    return int(sum(done.values()) != options.requests)


if __name__ == "__main__":
    raise SystemExit(main())
