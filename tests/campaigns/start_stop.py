# SPDX-License-Identifier: Apache-2.0
"""Campaign: refused starts and stops, of each kind many times.

    python -m tests.campaigns.start_stop --times 50 --engine-times 50 --jobs 2
    python -m tests.campaigns.start_stop --only rds --times 5

Nothing may abort, hang, take more than ten seconds or leave a socket, a segment or a
thread; what is drained is answered whole. Kinds whose names begin with ``serve`` or
``offline`` start real engines, of which ``--jobs`` run at a time. They are forks of a
process that has vLLM imported, unless ``--unforked``. Without a connector
(``serve-none``) they show what is vLLM's own: it kills its engine at once and may wait
for clients of requests that have no end then. Here the clients go away after five
seconds, and it must end.
"""

# Standard
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
import argparse
import functools
import json
import signal
import sys
import tempfile

# First Party
from tests.campaigns import connector_trials, engine_trials
from tests.campaigns.connector_trials import ENDS, TIERS, Result, Trial, problems, rds
from tests.campaigns.engine_trials import CONNECTOR, MP_CONNECTOR, Stop
from tests.e2e.serving import serving_environment
from tests.support.forked_programs import forking
from tests.support.serving import tiny_models
from tests.support.serving.runtime import Runtime, find_runtime, own_machine

WITHIN_S = 10.0

#: Starts that are refused: environment, extra config, and what the message must name.
REFUSALS: dict[str, tuple[dict[str, str], dict[str, object], str]] = {
    "no-seed": ({"PYTHONHASHSEED": ""}, {}, "PYTHONHASHSEED"),
    "random-seed": ({"PYTHONHASHSEED": "random"}, {}, "PYTHONHASHSEED"),
    "chunk-200": ({"LMCACHE_CHUNK_SIZE": "200"}, {}, "LMCACHE_CHUNK_SIZE"),
    "chunk-0": ({"LMCACHE_CHUNK_SIZE": "0"}, {}, "LMCACHE_CHUNK_SIZE"),
    "chunk-abc": ({"LMCACHE_CHUNK_SIZE": "abc"}, {}, "chunk"),
    "cpu-five": ({"LMCACHE_MAX_LOCAL_CPU_SIZE": "five"}, {}, "five"),
    "cpu-negative": ({"LMCACHE_MAX_LOCAL_CPU_SIZE": "-1"}, {}, ""),
    "cpu-tiny": ({"LMCACHE_MAX_LOCAL_CPU_SIZE": "0.00001"}, {}, "LMCACHE_MAX_LOCAL"),
    "cpu-huge": ({"LMCACHE_MAX_LOCAL_CPU_SIZE": "1000000"}, {}, ""),
    "cpu-nothing": ({"LMCACHE_MAX_LOCAL_CPU_SIZE": "0"}, {}, ""),
    "no-tier": ({"LMCACHE_LOCAL_CPU": "False"}, {}, "no storage tier"),
    "layerwise": ({"LMCACHE_USE_LAYERWISE": "True"}, {}, "LMCACHE_USE_LAYERWISE"),
    "blending": ({"LMCACHE_ENABLE_BLENDING": "True"}, {}, "LMCACHE_ENABLE_BLENDING"),
    "v3": ({"LMCACHE_USE_GPU_CONNECTOR_V3": "True"}, {}, "LMCACHE_USE_GPU_CONNECTOR"),
    "first-rank": (
        {"LMCACHE_EXTRA_CONFIG": '{"save_only_first_rank": true}'},
        {},
        "save_only_first_rank",
    ),
    "extra-config": ({"LMCACHE_EXTRA_CONFIG": "{not json"}, {}, ""),
    "rds-string": (rds(rds_buffer_size="2048"), {}, "rds_buffer_size"),
    "rds-small": (rds(rds_buffer_size=0), {}, "rds_buffer_size"),
    "rds-unknown": (rds(rds_bufer_size=64), {}, "rds_bufer_size"),
    "rds-policy": (rds(rds_failure_policy="maybe"), {}, "rds_failure_policy"),
    "rds-cpu": (rds() | {"LMCACHE_MAX_LOCAL_CPU_SIZE": "0.01"}, {}, "RDSBackend"),
    "rds-class": (
        rds(**{"storage_plugin.RDSBackend.class_name": "RDSBackendd"}),
        {},
        "RDSBackend",
    ),
    "rds-module": (
        rds(**{"storage_plugin.RDSBackend.module_path": "no.such.module"}),
        {},
        "RDSBackend",
    ),
    "remote-scheme": ({"LMCACHE_REMOTE_URL": "nonsense://nowhere"}, {}, ""),
    "disk-nowhere": (
        {"LMCACHE_LOCAL_DISK": "/proc/no", "LMCACHE_MAX_LOCAL_DISK_SIZE": "1"},
        {},
        "",
    ),
    "plugin-missing": (
        {
            "LMCACHE_REMOTE_STORAGE_PLUGINS": "gone",
            "LMCACHE_EXTRA_CONFIG": '{"remote_storage_plugin.gone.module_path": "g"}',
        },
        {},
        "gone",
    ),
    "setting-unknown": ({}, {"lmcache_rbln.degraded": True}, "allow_degraded"),
    "setting-value": ({}, {"lmcache_rbln.allow_degraded": "so"}, "allow_degraded"),
    "policy-value": ({}, {"lmcache_rbln.load_failure_policy": "x"}, "load_failure"),
    "external-lookup": ({"LMCACHE_EXTERNAL_LOOKUP_CLIENT": "nowhere"}, {}, ""),
}
#: Of these, those that a whole engine refuses too.
SERVED_REFUSALS = ("no-seed", "cpu-five", "rds-string", "rds-small", "rds-cpu")
#: Of a stop by vLLM; of a start that fails behind the connector.
CLEAN = (0,)
REFUSED = (1,)


def trials(times: int, only: Sequence[str]) -> list[tuple[Trial, tuple[int, ...], str]]:
    """Make the trials of a campaign.

    Args:
        times: How often each is done.
        only: Words of which one must be in the name; none takes all.

    Returns:
        Each with the exit statuses that are right and what its log must name.
    """
    made: list[tuple[Trial, tuple[int, ...], str]] = []
    for tier, env in TIERS.items():
        for end in ENDS:
            for idle in (False, True):
                name = f"stop-{tier}-{end}{'-idle' if idle else ''}"
                made.append((Trial(name, env, {}, end, not idle), CLEAN, ""))
        made.append(
            (
                Trial(f"warm-up-fails-{tier}", env, {}, "engine-ends", True, True),
                REFUSED,
                "warm-up failed",
            )
        )
    for name, (env, extra, named) in REFUSALS.items():
        for end in ("engine-ends", "process-ends"):
            trial = Trial(f"refused-{name}-{end}", env, dict(extra), end, False)
            made.append((trial, REFUSED, named))
    wanted = [m for m in made if not only or any(word in m[0].name for word in only)]
    return [trial for trial in wanted for _ in range(times)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign and print one line for each kind."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=50, help="trials of each kind")
    parser.add_argument("--engine-times", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="engines at a time")
    parser.add_argument("--unforked", action="store_true", help="start engines anew")
    parser.add_argument(
        "--within", type=float, default=WITHIN_S, help="seconds that an end may take"
    )
    parser.add_argument("--only", nargs="*", default=(), help="words in the names")
    parser.add_argument("--folder", type=Path, help="where logs go and stay")
    options = parser.parse_args(argv)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="start-stop-"))
    wrong = 0
    if chosen := trials(options.times, options.only):
        wrong += component(folder / "component", chosen)
    return wrong + engines(folder, options)


def engines(folder: Path, options: argparse.Namespace) -> int:
    """Run trials with real engines; return how many were wrong."""
    kinds = engine_kinds(find_runtime())
    names = [n for n in kinds if not options.only or any(w in n for w in options.only)]
    seen: dict[str, list[Result]] = defaultdict(list)
    wrong: Counter[str] = Counter()

    def run(trial: tuple[int, str]) -> None:
        number, name = trial
        begin, statuses, last = kinds[name]
        result = begin(folder / f"{name}-{number}")
        found = problems(result, statuses, options.within if last is None else 120.0)
        lines = result.log.strip().splitlines()
        if last is not None and last not in lines[-1]:
            found.append(f"the last line is {lines[-1]!r}, wanted {last!r}")
        seen[name].append(result)
        wrong[name] += bool(found)
        waited = "ok, vLLM waited for its clients" if result.waited else "ok"
        print(
            f"{name:45s} status {result.status} in {result.seconds:.2f} s "
            f"{'; '.join(found) or waited}",
            flush=True,
        )

    trials = [(time, name) for time in range(options.engine_times) for name in names]
    engine_trials.model_in(folder)
    starts = nullcontext() if options.unforked else forking()
    with starts, ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, trials))
    for name, results in seen.items():
        slowest = max(result.seconds for result in results)
        waited = sum(result.waited for result in results)
        print(
            f"{name:45s} {len(results):4d} times, {wrong[name]} wrong, slowest "
            f"{slowest:5.2f} s, waited for clients {waited} times"
        )
    return wrong.total()


Run = Callable[[Path], Result]


def engine_kinds(
    runtime: Runtime,
) -> dict[str, tuple[Run, tuple[int, ...], str | None]]:
    """Kinds of trials: what runs, the right statuses, what the last line names."""
    kinds: dict[str, tuple[Run, tuple[int, ...], str | None]] = {}

    def add(stop: Stop, statuses: tuple[int, ...], last: str | None) -> None:
        run = functools.partial(engine_trials.serve, runtime, stop=stop)
        kinds[stop.name] = (run, statuses, last)

    for tier in ("none", "cpu", "rds", "async", "mp", "none-on-two", "cpu-on-two"):
        bare, _, two = tier.partition("-on-")
        connector = {"none": None, "mp": MP_CONNECTOR}.get(bare, CONNECTOR)
        ranks = 2 if two else 1
        for number in (signal.SIGINT, signal.SIGTERM):
            for drains in (0, 30):
                for busy in (False, True):
                    words = ["serve", tier, number.name]
                    words += ["drain"] * bool(drains) + ["busy"] * busy
                    env = TIERS.get(bare, {})
                    stop = Stop("-".join(words), env, number, drains, busy)
                    stop.connector, stop.ranks = connector, ranks
                    add(stop, CLEAN, None)
    for name, (env, extra, named) in REFUSALS.items():
        if not extra and name in SERVED_REFUSALS:
            add(Stop(f"serve-refused-{name}", env, None), REFUSED, named)
    for end in ("scope", "interpreter"):
        for several in (False, True):
            for tier in ("cpu", "rds"):
                name = f"offline-{tier}-{end}-{'several' if several else 'one'}"
                run = functools.partial(
                    engine_trials.offline,
                    runtime,
                    name=name,
                    end=end,
                    several=several,
                    tier=TIERS[tier],
                )
                kinds[name] = (run, CLEAN, None)
    return kinds


def component(
    folder: Path, chosen: Sequence[tuple[Trial, tuple[int, ...], str]]
) -> int:
    """Run trials without a model; return how many were wrong."""
    wrong = 0
    seen: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    faults: Counter[str] = Counter()
    results = run_component(folder, [c[0] for c in chosen])
    for (trial, statuses, named), result in zip(chosen, results, strict=True):
        found = problems(result, statuses, WITHIN_S)
        if named and named not in result.log:
            found.append(f"{named!r} is not named in the log")
        seen[trial.name] += 1
        slowest[trial.name] = max(slowest.get(trial.name, 0.0), result.seconds)
        wrong += bool(found)
        for fault in found:
            faults[f"{trial.name}: {fault}"] += 1
        if seen.total() % 10 == 0:
            print(f"{seen.total()} trials, {wrong} wrong", flush=True)
    for name, count in seen.items():
        print(f"{name:45s} {count:4d} times, slowest {slowest[name]:5.2f} s")
    for text, count in sorted(faults.items()):
        print(f"WRONG {count:3d} times: {text}")
    print(
        json.dumps({"trials": sum(seen.values()), "wrong": wrong, "logs": str(folder)})
    )
    return wrong


def run_component(folder: Path, chosen: Sequence[Trial]) -> Iterator[Result]:
    """Run trials without a model, in an environment of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    env = serving_environment(find_runtime(), folder / "cache", None)
    env |= own_machine(folder, devices=2) | {
        "PYTHONHASHSEED": "0",
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.01",
        "LMCACHE_CHUNK_SIZE": "256",
        "RBLN_SIM_MEMORY_GIB": "8",
        "OMP_NUM_THREADS": "1",
    }
    size = tiny_models.Size(max_positions=4096)
    for model in sorted({trial.model for trial in chosen}):
        tiny_models.make(model, folder / "models", size)
    return connector_trials.run(folder, chosen, env, folder / "models")


if __name__ == "__main__":
    sys.exit(bool(main()))
