#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Can this host run the RBLN tests? Checks packages and NPU, prints a verdict.

Exit status 0 means ready. A simulated NPU is named as such in the verdict, so that
its results are never taken for those of hardware.
"""

# Standard
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile

# This file is started by its path: the repository is not on sys.path by itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

# First Party
from tests.support.serving.runtime import (  # noqa: E402
    WANTED,
    Runtime,
    find_runtime,
    own_machine,
)

PYTHONS = ((3, 10), (3, 13))
# Versions that this release is made for, as prefixes.
VERSIONS = {
    "lmcache": "0.5.6+rbln",
    "torch-rbln": "0.12.",
    "vllm-rbln": "0.12.",
    "vllm": "0.30.",
}
SHM_NEEDED = 1 << 30
PROBE_TIMEOUT_S = 180

# Runs in a process of its own, so that a crash of the runtime is a result as well.
# Opening is the last step: its failure leaves the other answers on the output.
PROBE = """
import json, os, torch
print(json.dumps({"torch": torch.__version__, "npus": torch.rbln.device_count()}))
import lmcache, lmcache.lmcache_native
print(json.dumps({"backend": lmcache.torch_device_type}))
torch.rbln.synchronize()
print(json.dumps({"name": torch.rbln.get_device_name(0)}))
"""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What it was.
        ok: Whether it is as it must be.
        found: What was found.
        fix: What to do about it when it is not.
    """

    name: str
    ok: bool
    found: str
    fix: str = ""


def check_python() -> Check:
    """Check the version of this interpreter."""
    low, high = PYTHONS
    version = sys.version_info[:2]
    return Check(
        "Python",
        low <= version <= high,
        ".".join(map(str, sys.version_info[:3])),
        f"use Python {low[0]}.{low[1]} to {high[0]}.{high[1]}",
    )


def check_versions() -> list[Check]:
    """Check that the packages this release is made for are installed."""
    checks = []
    for name, wanted in VERSIONS.items():
        found = _version(name)
        checks.append(
            Check(
                name,
                found is not None and found.startswith(wanted),
                found or "not installed",
                f"install {name} {wanted.rstrip('.')}",
            )
        )
    return checks


def check_torch() -> Check:
    """Check that torch is the one that torch-rbln pins."""
    pinned = next(
        (
            requirement.split("==")[1].split(";")[0].strip()
            for requirement in _requirements("torch-rbln")
            if requirement.startswith("torch==")
        ),
        None,
    )
    found = _version("torch")
    return Check(
        "torch",
        found is not None and (pinned is None or found == pinned),
        found or "not installed",
        f"torch-rbln pins torch {pinned}: reinstall it from the vendor's index",
    )


def check_programs() -> list[Check]:
    """Check that both servers can be started from this environment."""
    checks = []
    for program in ("lmcache", "vllm"):
        path = Path(sys.executable).parent / program
        checks.append(
            Check(
                f"{program} command",
                path.exists(),
                str(path) if path.exists() else "missing",
                f"install {program} into the environment of {sys.executable}",
            )
        )
    return checks


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Check:
    """Check that a shared-memory segment for KV fits."""
    free = shutil.disk_usage(folder).free
    return Check(
        "shared memory",
        free >= SHM_NEEDED,
        f"{free / 2**30:.1f} GiB free in {folder}",
        f"make at least {SHM_NEEDED >> 30} GiB free (containers: --shm-size)",
    )


def check_npu(runtime: Runtime) -> list[Check]:
    """Open the NPU in a process of its own, with LMCache's backend pinned.

    Args:
        runtime: Where to open it.

    Returns:
        Checks of LMCache's native code, its backend and the NPU.
    """
    with tempfile.TemporaryDirectory(prefix="rbln-preflight-") as folder:
        env = runtime.env | {
            **own_machine(Path(folder)),
            "LMCACHE_DEVICE_BACKEND": "rbln",
            "LMCACHE_DISABLE_BANNER": "1",
            "LMCACHE_TRACK_USAGE": "false",
        }
        try:
            probe = subprocess.run(
                [sys.executable, "-c", PROBE],
                env=env,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=PROBE_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            hung = f"no answer in {PROBE_TIMEOUT_S} s"
            return [Check("NPU", False, hung, "check the driver and its log")]
    return judge_probe(probe.stdout, probe.stderr)


def judge_probe(output: str, errors: str) -> list[Check]:
    """Turn the answers of the probe into checks.

    Args:
        output: Its standard output.
        errors: Its standard error.

    Returns:
        The checks; what failed first carries the reason.
    """
    answers: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith("{"):
            answers.update(json.loads(line))
    # The runtime's own word comes before the exception that it became.
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    refusals = [line for line in lines if line.startswith("[rbln-sim]")]
    reason = "; ".join([*refusals[-1:], *lines[-1:]]) or "no reason given"
    npus = answers.get("npus", 0)
    checks = [
        Check(
            "NPUs visible",
            npus > 0,
            str(npus) if "npus" in answers else reason,
            "check the driver and RBLN_VISIBLE_DEVICES",
        )
    ]
    if npus:
        backend = answers.get("backend")
        checks.append(
            Check(
                "LMCache backend",
                backend == "rbln",
                str(backend) if backend else reason,
                "install LMCache's +rbln wheel built for this torch",
            )
        )
    if npus and "backend" in answers:
        checks.append(
            Check(
                "NPU opens",
                "name" in answers,
                str(answers.get("name", reason)),
                "end the process that holds it",
            )
        )
    return checks


def run_checks(wanted: str) -> tuple[str, list[Check]]:
    """Run every check.

    Args:
        wanted: ``auto``, ``sim`` or ``npu``.

    Returns:
        Name of the runtime and all checks.
    """
    checks = [check_python(), check_torch(), *check_versions()]
    checks += [*check_programs(), check_shared_memory()]
    try:
        runtime = find_runtime(os.environ, wanted)
    except RuntimeError as error:
        checks.append(Check("runtime", False, str(error), "see above"))
        return "none", checks
    checks.append(Check("runtime", True, runtime.name))
    return runtime.name, [*checks, *check_npu(runtime)]


def format_verdict(runtime: str, checks: list[Check]) -> str:
    """Lay the checks out for people, the verdict last.

    Args:
        runtime: Name of the runtime.
        checks: All checks.

    Returns:
        Several lines.
    """
    width = max(len(check.name) for check in checks)
    lines = ["RBLN preflight"]
    for check in checks:
        mark = "ok  " if check.ok else "FAIL"
        lines.append(f"  {mark}  {check.name:<{width}}  {check.found}")
        if not check.ok:
            lines.append(f"        {'':<{width}}  -> {check.fix}")
    failed = sum(not check.ok for check in checks)
    if failed:
        lines.append(f"verdict: NOT READY, {failed} of {len(checks)} checks failed")
    elif runtime.startswith("NPU"):
        lines.append(f"verdict: READY on {runtime}")
    else:
        lines.append(f"verdict: READY on {runtime}; this validates no hardware")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the preflight.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        Exit status: 0 when ready.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runtime", choices=WANTED, default="auto")
    parser.add_argument("--json", type=Path, help="also write the checks here")
    args = parser.parse_args(argv)
    runtime, checks = run_checks(args.runtime)
    print(format_verdict(runtime, checks))
    ready = all(check.ok for check in checks)
    if args.json is not None:
        content = {
            "runtime": runtime,
            "ready": ready,
            "checks": [asdict(check) for check in checks],
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0 if ready else 1


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _requirements(distribution: str) -> list[str]:
    try:
        return metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return []


if __name__ == "__main__":
    sys.exit(main())
