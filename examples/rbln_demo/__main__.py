# SPDX-License-Identifier: Apache-2.0
"""``python -m examples.rbln_demo``: cold and warm prompts through LMCache.

Starts ``lmcache server`` and ``vllm serve`` with a tiny random-weight model,
sends the same long prompts twice with vLLM's own prefix caching off, prints what
was stored and restored, and stops everything. Ends with status 1 and the reason
when anything is off.
"""

# Standard
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
import argparse
import os
import random
import shlex
import signal
import sys
import time

# First Party
from examples.rbln_demo.report import (
    Measurement,
    find_problems,
    format_table,
    whole_chunks,
)
from tests.support.serving import tiny_models
from tests.support.serving.client import RequestFailedError
from tests.support.serving.processes import ServerFailedError
from tests.support.serving.runtime import (
    WANTED,
    find_runtime,
    own_machine,
    serving_environment,
)
from tests.support.serving.servers import (
    CacheServer,
    CacheServerConfig,
    Engine,
    EngineConfig,
    transport_of,
)

REPO = Path(__file__).resolve().parents[2]
HITS = "vllm:external_prefix_cache_hits_total"
SOURCES = "vllm:prompt_tokens_by_source_total"
READ_CHUNKS = "lmcache_mp_l1_read_chunks_total"


class Progress:
    """Prints each step with the time since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._next_wait = 5.0

    def say(self, text: str) -> None:
        """Print one step."""
        self._next_wait = 5.0
        print(f"[{time.monotonic() - self._start:5.1f} s] {text}", flush=True)

    def waiting(self, seconds: float) -> None:
        """Print a sign of life every five seconds of a wait."""
        if seconds >= self._next_wait:
            self._next_wait += 5.0
            elapsed = time.monotonic() - self._start
            print(f"[{elapsed:5.1f} s]   ... {seconds:.0f} s", flush=True)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        The parsed arguments.
    """
    parser = argparse.ArgumentParser(
        prog="python -m examples.rbln_demo", description=__doc__
    )
    parser.add_argument(
        "--runtime",
        choices=WANTED,
        default="auto",
        help="auto takes a real NPU where its stack is installed",
    )
    models = ("qwen3", "llama", "mla")
    parser.add_argument("--model", choices=models, default="qwen3")
    parser.add_argument("--prompts", type=int, default=4, help="sent at once")
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument(
        "--block-size", type=int, default=256, help="of vLLM; also LMCache's chunk"
    )
    parser.add_argument(
        "--transport",
        choices=("shm", "pickle"),
        default="shm",
        help="shm adds --shm-name to the server's command",
    )
    parser.add_argument("--folder", type=Path, default=REPO / "build" / "demo")
    args = parser.parse_args(argv)
    shortest = args.block_size + 64 * args.prompts
    if args.prompts < 1 or args.max_tokens < 1 or args.block_size < 1:
        parser.error("--prompts, --max-tokens and --block-size must be positive")
    if args.prompt_tokens < shortest:
        parser.error(
            f"--prompt-tokens {args.prompt_tokens} is too short: with "
            f"{args.prompts} prompts and blocks of {args.block_size} it takes "
            f"at least {shortest}"
        )
    return args


def make_prompts(count: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Make random prompts of different lengths that share no prefix.

    Args:
        count: Number of prompts.
        longest: Tokens of the first; each next one is 64 shorter.
        vocabulary: Number of token ids; the three special ones are avoided.

    Returns:
        Prompts as token ids, the same in every run.
    """
    chance = random.Random(0)
    return [
        [chance.randrange(3, vocabulary) for _ in range(longest - 64 * index)]
        for index in range(count)
    ]


def run(args: argparse.Namespace, progress: Progress) -> Measurement:
    """Run the demo.

    Args:
        args: See :func:`parse_arguments`.
        progress: Told about every step.

    Returns:
        What was measured.

    Raises:
        ServerFailedError: If a server fails.
        RequestFailedError: If a request fails.
    """
    runtime = find_runtime(wanted=args.runtime)
    progress.say(f"runtime: {runtime.name}")
    folder: Path = args.folder
    model = tiny_models.make(args.model, folder / "models")
    progress.say(f"model: {model} (random weights)")
    prompts = make_prompts(args.prompts, args.prompt_tokens, tiny_models.VOCAB_SIZE)
    lengths = tuple(len(prompt) for prompt in prompts)
    chunks = whole_chunks(lengths, args.block_size)
    blocks_each = -(-(max(lengths) + args.max_tokens) // args.block_size)
    env = serving_environment(runtime, folder / "cache") | own_machine(folder)
    cache = CacheServer(
        CacheServerConfig(
            chunk_size=args.block_size,
            shm_name=f"rbln_demo_{os.getpid()}" if args.transport == "shm" else "",
        ),
        env,
        folder / "logs",
    )
    engine = Engine(
        EngineConfig(
            model=model,
            block_size=args.block_size,
            max_model_len=blocks_each * args.block_size,
            max_seqs=args.prompts,
            num_blocks=(args.prompts + 1) * blocks_each,
        ),
        cache.port,
        env,
        folder / "logs",
    )
    with stopping(cache, engine, progress):
        progress.say("$ " + shlex.join(cache.process.command))
        cache.start()
        seconds = cache.wait_ready(on_wait=progress.waiting)
        progress.say(f"lmcache server is ready after {seconds:.0f} s")
        progress.say("$ " + shlex.join(engine.process.command))
        engine.start()
        seconds = engine.wait_ready(on_wait=progress.waiting)
        progress.say(f"vllm serve is ready after {seconds:.0f} s")

        # Too short for a chunk: pays for first-time work, stores nothing.
        engine.complete([prompts[0][: args.block_size // 2]], 2)
        before = engine.counters()
        progress.say(f"cold: {args.prompts} prompts at once, {sum(lengths):,} tokens")
        cold = engine.complete(prompts, args.max_tokens)
        memory = cache.wait_stored(chunks)
        between = engine.counters()
        progress.say("warm: the same prompts again")
        warm = engine.complete(prompts, args.max_tokens)
        cache.wait_stored(chunks)
        after = engine.counters()
        return Measurement(
            runtime=runtime.name,
            transport=transport_of(engine.process.log()),
            wanted_transport="SHM" if args.transport == "shm" else "pickle",
            chunk_size=args.block_size,
            prompt_tokens=lengths,
            cold=tuple(cold),
            warm=tuple(warm),
            stored_chunks=memory["total_object_count"],
            stored_bytes=memory["memory_used_bytes"],
            restored_tokens=int(after.total(HITS) - between.total(HITS)),
            restored_chunks=read_chunks(cache, chunks),
            cold_hits=int(between.total(HITS) - before.total(HITS)),
            local_hits=int(after.total(SOURCES, source="local_cache_hit")),
        )


def read_chunks(cache: CacheServer, wanted: int, timeout_s: float = 60.0) -> int:
    """Read how many chunks the server handed out, once its counter caught up.

    Args:
        cache: The server; its metrics are a moment late.
        wanted: Number to wait for.
        timeout_s: Longest wait in seconds.

    Returns:
        The number, whether it is the wanted one or not.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        chunks = int(cache.counters().total(READ_CHUNKS))
        if chunks >= wanted or time.monotonic() > deadline:
            return chunks
        time.sleep(0.1)


@contextmanager
def stopping(cache: CacheServer, engine: Engine, progress: Progress) -> Iterator[None]:
    """Stop both servers on the way out, whatever happens inside.

    Raises:
        ServerFailedError: If stopping fails and nothing failed before.
    """
    failed = True
    try:
        yield
        failed = False
    finally:
        progress.say("stopping both servers")
        problems = []
        for server in (engine, cache):
            try:
                server.stop()
            except ServerFailedError as error:
                problems.append(error)
        for problem in problems:
            if not failed:
                raise problem
            print(f"while stopping: {problem}", file=sys.stderr)


def _end_on_signal(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(argv: list[str] | None = None) -> int:
    """Run the demo and print its table.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        Exit status: 0 when all is well, 1 otherwise.
    """
    args = parse_arguments(argv)
    # SIGTERM must unwind like ^C, or the servers would outlive the demo.
    signal.signal(signal.SIGTERM, _end_on_signal)
    progress = Progress()
    try:
        result = run(args, progress)
    except (ServerFailedError, RequestFailedError, RuntimeError, OSError) as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nFAILED: interrupted", file=sys.stderr)
        return 130
    problems = find_problems(result)
    print(f"\n{format_table(result)}\n")
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    if not problems:
        print("OK: the warm round restored every stored token, outputs are equal.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
