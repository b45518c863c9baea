# SPDX-License-Identifier: Apache-2.0
"""Runs LMCache's own tests of the installed release over our wheel.

    make test-upstream
    .venv/bin/python -m tests.upstream.suites tests/v1/multiprocess -x

The tests come from the release's sdist and run as they are, on a real NPU or a
simulated one. What fails there is listed in ``known_failures.toml`` with its reason;
any other failure, and one that is listed and passes, fails the run.
"""

# Future
from __future__ import annotations

# Standard
from collections.abc import Sequence
from pathlib import Path
import os
import subprocess
import sys
import tarfile
import tempfile

# First Party
from tests.support.serving.runtime import find_runtime, own_machine
from tests.upstream.known_failures import RELEASE

ROOT = Path(__file__).resolve().parents[2]
#: Suites of what this repository changes, replaces or builds on.
SUITES = (
    "tests/test_build_profiles_rbln.py",
    "tests/v1/gpu_connector",
    "tests/v1/lookup_client",
    "tests/v1/multiprocess",
    "tests/v1/platform",
    "tests/v1/storage_backend",
    "tests/v1/test_kv_*.py",
    "tests/v1/test_memory_*.py",
    "tests/v1/test_mp_*.py",
    "tests/v1/test_vllm_*.py",
)
#: A test that hangs is a failure. The slowest takes some seconds.
LIMIT_S = 600


def sdist() -> Path:
    """Return where the sdist of the installed release is, or would be."""
    kept = ROOT / "build/cache/sdist" / f"lmcache-{RELEASE}.tar.gz"
    return Path(os.environ.get("LMCACHE_SDIST") or kept)


def unpack(folder: Path) -> Path:
    """Unpack LMCache's tests.

    Args:
        folder: Where they go.

    Returns:
        The folder that stands for the root of the sdist.

    Raises:
        FileNotFoundError: If there is no sdist.
    """
    with tarfile.open(sdist()) as archive:
        members = [
            m for m in archive if m.name.split("/")[1:2] in (["tests"], ["pytest.ini"])
        ]
        archive.extractall(folder, members, filter="data")
    return next(folder.glob("lmcache-*"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run suites, all by default; return pytest's status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with tempfile.TemporaryDirectory(prefix="lmcache-tests-") as scratch:
        root = unpack(Path(scratch))
        if not any(word.startswith("tests/") for word in given):
            paths = (path for suite in SUITES for path in sorted(root.glob(suite)))
            given += [str(path.relative_to(root)) for path in paths]
        env = find_runtime().env | own_machine(root, devices=2)
        env["PYTHONHASHSEED"] = "0"
        env.pop("LMCACHE_DEVICE_BACKEND", None)
        # Their package of tests has our folder's name: only the plugin comes from here.
        env["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parent), *filter(None, [env.get("PYTHONPATH")])]
        )
        command = [sys.executable, "-m", "pytest", "-p", "known_failures", "-q", "-rf"]
        command += ["-p", "no:cacheprovider", "-o", "log_cli=false"]
        command += [f"--timeout={LIMIT_S}", *given]
        return subprocess.run(command, cwd=root, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
