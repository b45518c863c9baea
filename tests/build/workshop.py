# SPDX-License-Identifier: Apache-2.0
"""Throw-away checkouts and environments for the tests of the build.

A checkout is a copy of this repository, so that a test can change it. An environment
is a venv that sees the packages of the running one through links: it costs no space,
and pip can install into it without touching the original.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "cache"
COPIED = (
    ".buildkite",
    "csrc",
    "docs",
    "examples",
    "lmcache",
    "patches",
    "requirements",
    "setup_extensions",
    "tests",
    "CHANGELOG.md",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "pyproject.toml",
    "setup.py",
    "upstream.toml",
)
# What must not leak from the test session into a build.
OWN_SETTINGS = ("BUILD_WITH_", "LMCACHE_", "NO_", "RBLN_", "TORCH_", "VLLM_")


def clean_environ(**settings: str) -> dict[str, str]:
    """Return the environment for a build, sharing the cache of this checkout.

    Args:
        settings: Variables to set on top.

    Returns:
        The environment, without the simulator that a test session may have activated.
    """
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(OWN_SETTINGS)
        and name not in ("CXX", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
    }
    tools = Path(sys.executable).parent
    environ["PATH"] = f"{tools}{os.pathsep}{environ['PATH']}"
    return {**environ, "LMCACHE_BUILD_CACHE": str(CACHE), **settings}


@dataclass(frozen=True)
class Run:
    """What a command left behind."""

    status: int
    output: str


def run(command: list[str | Path], cwd: Path, environ: dict[str, str]) -> Run:
    """Run a command to its end.

    Args:
        command: Program and arguments.
        cwd: Working directory.
        environ: Its whole environment.

    Returns:
        Exit status, and both output streams as one text.
    """
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Run(done.returncode, done.stdout)


@dataclass(frozen=True)
class Checkout:
    """A copy of this repository, a git repository of its own."""

    root: Path

    @classmethod
    def make(cls, root: Path) -> Checkout:
        """Copy what git tracks or would track of this repository to ``root``."""
        junk = shutil.ignore_patterns("__pycache__", ".*_cache", "*.so", "*.pyc")
        root.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=junk)
            elif source.exists():
                shutil.copy2(source, root / name)
        # Tracked, since setuptools_scm offers every tracked file to an sdist.
        for command in (["init", "--quiet"], ["add", "--all"]):
            subprocess.run(["git", *command], cwd=root, check=True)
        return cls(root)

    def setup(self, *arguments: str, **settings: str) -> Run:
        """Run ``python setup.py ARGUMENTS`` with further environment variables."""
        command: list[str | Path] = [sys.executable, "setup.py", *arguments]
        return run(command, self.root, clean_environ(**settings))

    def metadata(self, **settings: str) -> Run:
        """Run the cheapest command that stages LMCache."""
        target = self.root / "metadata"
        target.mkdir(exist_ok=True)
        return self.setup("dist_info", "--output-dir", str(target), **settings)

    def wheel(self, target: Path, **settings: str) -> Path:
        """Build the wheel as the README says, and return it."""
        command: list[str | Path] = [sys.executable, "-m", "pip", "wheel", "."]
        command += ["--no-build-isolation", "--no-deps", "--wheel-dir", target]
        built = run(command, self.root, clean_environ(**settings))
        assert built.status == 0, built.output
        (wheel,) = target.glob("*.whl")
        return wheel

    def files(self, folder: str) -> set[str]:
        """List every file below a folder, caches of Python aside."""
        return {
            path.relative_to(self.root).as_posix()
            for path in (self.root / folder).rglob("*")
            if not path.is_dir() and "__pycache__" not in path.parts
        }


@dataclass(frozen=True)
class Environment:
    """A venv that sees the packages of the running environment, or most of them.

    They lie in a pool outside the venv. pip counts them as installed and takes them
    out of nothing: where it wants another version it installs that one into the venv,
    where it comes first.
    """

    root: Path

    @classmethod
    def make(cls, root: Path, without: set[str]) -> Environment:
        """Make a venv that sees all packages but some.

        Args:
            root: Folder to make.
            without: Names of distributions to leave out.

        Returns:
            The environment.
        """
        made = cls(root)
        venv = [sys.executable, "-m", "venv", "--without-pip", str(root / "venv")]
        subprocess.run(venv, check=True)
        made.pool.mkdir()
        source = Path(sysconfig.get_paths()["purelib"])
        kept: set[str] = set()
        hidden: set[str] = set()
        for found in metadata.distributions(path=[str(source)]):
            tops = {file.parts[0] for file in found.files or ()} - {".."}
            (hidden if canonicalize_name(found.name) in without else kept).update(tops)
        for path in source.iterdir():
            # A namespace such as "google" belongs to more than one distribution.
            if path.name in kept or path.name not in hidden:
                (made.pool / path.name).symlink_to(path)
        (made.site / "pool.pth").write_text(f"{made.pool}\n", encoding="utf-8")
        return made

    @property
    def pool(self) -> Path:
        """The folder of packages that were there before pip ran."""
        return self.root / "pool"

    @property
    def python(self) -> Path:
        """The interpreter."""
        return self.root / "venv" / "bin" / "python"

    @property
    def site(self) -> Path:
        """The folder into which pip installs."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.root / "venv" / "lib" / version / "site-packages"

    @contextlib.contextmanager
    def another_torch(self, version: str) -> Iterator[None]:
        """Let torch be another version while the context lasts."""
        link = self.pool / "torch"
        real = link.resolve()
        (own,) = self.pool.glob("torch-*.dist-info")
        told = own.resolve()
        link.unlink()
        own.unlink()
        link.mkdir()
        try:
            for path in real.iterdir():
                if path.name != "version.py":
                    (link / path.name).symlink_to(path)
            for source, target in (
                (real / "version.py", link / "version.py"),
                (told / "METADATA", self.pool / f"torch-{version}.dist-info/METADATA"),
            ):
                text = source.read_text(encoding="utf-8")
                target.parent.mkdir(exist_ok=True)
                target.write_text(text.replace("2.13.0+cpu", version), encoding="utf-8")
            yield
        finally:
            shutil.rmtree(link)
            shutil.rmtree(self.pool / f"torch-{version}.dist-info")
            link.symlink_to(real)
            own.symlink_to(told)

    def run(self, *arguments: str | Path, cwd: Path, **settings: str) -> Run:
        """Run Python with the given arguments."""
        return run([self.python, *arguments], cwd, clean_environ(**settings))

    def pip(self, *arguments: str | Path, cwd: Path, **settings: str) -> Run:
        """Run pip with the given arguments."""
        return self.run("-m", "pip", *arguments, cwd=cwd, **settings)

    def freeze(self) -> dict[str, str]:
        """Return name and version of every distribution that pip sees."""
        done = self.pip("list", "--format=json", cwd=Path("/"))
        assert done.status == 0, done.output
        start = done.output.index("[{")
        listed = json.JSONDecoder().raw_decode(done.output, start)[0]
        return {canonicalize_name(entry["name"]): entry["version"] for entry in listed}

    def complaints(self) -> set[str]:
        """Return the lines of ``pip check``."""
        return set(self.pip("check", cwd=Path("/")).output.splitlines())


def decoy_compiler(folder: Path, *, version: str = "") -> Path:
    """Make a C++ compiler that says what the real one says, and never compiles.

    Args:
        folder: Where to put it.
        version: What it says about its version instead, if given.

    Returns:
        Path of the program.
    """
    real = shutil.which("c++")
    assert real is not None
    answer = f"echo '{version}'; exit" if version else f'exec "{real}" "$@"'
    return script(
        folder / "c++",
        'case "$1" in\n'
        f"  --version) {answer} ;;\n"
        f'  -dumpmachine|-v) exec "{real}" "$@" ;;\n'
        "esac\n"
        'echo "DECOY COMPILER CALLED: $*" >&2\n'
        "exit 1\n",
    )


def script(path: Path, body: str) -> Path:
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}", encoding="utf-8")
    path.chmod(0o755)
    return path


def with_nvcc(folder: Path) -> str:
    """Return a PATH with CUDA's compiler, by which LMCache picks its CUDA build."""
    script(folder / "nvcc", "echo 'release 13.0, V13.0.48'\n")
    return f"{folder}{os.pathsep}{clean_environ()['PATH']}"
