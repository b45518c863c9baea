# SPDX-License-Identifier: Apache-2.0
"""Build LMCache with this repository laid over it.

This repository holds only the files that it adds to LMCache or replaces in it. A
build fetches the LMCache release that ``upstream.toml`` pins, unpacks it into a stage
below ``build/``, lays our files on top, applies ``patches/`` and hands over to
LMCache's own ``setup.py`` there. ``egg_info`` and ``sdist`` are about this repository
alone: they stage nothing.

Settings (environment):
    LMCACHE: ``next`` builds the second release that ``upstream.toml`` pins.
    BUILD_WITH_RBLN: 1 builds for RBLN where torch_rbln is not installed.
    LMCACHE_SDIST: an LMCache sdist or checkout to use instead of the download.
    LMCACHE_BUILD_CACHE: folder for the download and for compiled extensions
        (default: build/cache).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import setuptools
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
# Not as a part of the package setup_extensions: that is LMCache's name once staged.
sys.path.insert(0, str(ROOT / "setup_extensions"))
from lmcache_overlay import (  # noqa: E402
    LITTER,
    NEXT,
    PATCHES,
    SHIPPED,
    Upstream,
    apply_patches,
    change_requirements,
    check_collisions,
    fail,
    lay_over,
    our_files,
    sha256_of,
)

sys.path.pop(0)

BUILD = ROOT / "build"

BUILD_COMMANDS = {
    "bdist_wheel",
    "build",
    "build_ext",
    "build_py",
    "develop",
    "dist_info",
    "editable_wheel",
    "install",
}
# What the build needs beside torch and setuptools. LMCache generates gRPC code: that of
# this release of the generator runs with every protobuf from 6.31.1 on, that of a newer
# one would silently raise the floor. Without setuptools_scm the version would be 0.0.0.
TOOLS = {"grpcio-tools": "1.78.0", "setuptools-scm": ""}
TORCH_RECORD = "lmcache/v1/platform/devices/rbln/built_with.py"


# ---- before anything is staged ------------------------------------------------------


def check_profile(environ: os._Environ[str] | dict[str, str]) -> None:
    """Refuse every build that would not be an RBLN one.

    Args:
        environ: The environment of the build.

    Raises:
        SystemExit: Another ``BUILD_WITH_*`` or a ``NO_*_EXT`` is set,
            ``BUILD_WITH_RBLN`` is neither 0 nor 1, or RBLN is neither installed nor
            asked for.
    """
    switches = {k: v for k, v in environ.items() if k.startswith("BUILD_WITH_")}
    asked = switches.pop("BUILD_WITH_RBLN", "0") or "0"
    for name, value in sorted(switches.items()):
        if value not in ("", "0"):
            raise fail(
                "an RBLN build: this repository makes no other",
                f"{name}={value}",
                f"unset {name}, or build that backend from LMCache itself",
            )
    for name in ("NO_NATIVE_EXT", "NO_CUDA_EXT", "NO_GPU_EXT"):
        if environ.get(name, "0") == "1":
            raise fail(
                "a build with LMCache's native extensions, which RBLN needs",
                f"{name}=1",
                f"unset {name}",
            )
    if asked not in ("0", "1"):
        raise fail("BUILD_WITH_RBLN to be 0 or 1", repr(asked), "set it to 1")
    if asked == "0" and importlib.util.find_spec("torch_rbln") is None:
        raise fail(
            "the package torch_rbln, or BUILD_WITH_RBLN=1",
            "neither",
            "install torch-rbln, or set BUILD_WITH_RBLN=1 to build without it",
        )


def check_tools() -> None:
    """Refuse a build environment that lacks torch or one of the other tools.

    Raises:
        SystemExit: torch is missing, as in every isolated build, or a tool is missing
            or not the release wanted.
    """
    if importlib.util.find_spec("torch") is None:
        raise fail(
            "the torch that LMCache will run with, in the environment of the build",
            f"none in {sys.prefix} (an isolated build never sees it)",
            "install torch first and pass --no-build-isolation to pip "
            "(--no-isolation to python -m build)",
        )
    for name, wanted in TOOLS.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found != wanted and (wanted or found == "none"):
            raise fail(
                f"{name} {wanted}".strip() + " in the environment of the build",
                found,
                f"pip install --no-deps {name}{wanted and '=='}{wanted}",
            )


# ---- fetching LMCache ---------------------------------------------------------------


def check_hash(archive: Path, upstream: Upstream, origin: str) -> None:
    """Refuse an archive that is not the pinned one.

    Raises:
        SystemExit: The hash differs.
    """
    got = sha256_of(archive)
    if got != upstream.sha256:
        raise fail(
            f"{upstream.name} {upstream.version} with sha256 {upstream.sha256}",
            f"{got} from {origin}",
            "do not use that file; to move to another LMCache change the pin in "
            "upstream.toml",
        )


def download(upstream: Upstream, cache: Path) -> Path:
    """Return the pinned sdist from the cache, or through pip.

    Args:
        upstream: The pin.
        cache: Folder that keeps the download.

    Returns:
        Path of the sdist, its hash checked.

    Raises:
        SystemExit: pip is missing or fails, or the hash differs.
    """
    kept = cache / "sdist" / f"{upstream.name}-{upstream.version}.tar.gz"
    if kept.exists():
        check_hash(kept, upstream, str(kept))
        return kept
    by_hand = "or set LMCACHE_SDIST to an sdist or checkout of LMCache"
    if importlib.util.find_spec("pip") is None:
        raise fail("pip, to download LMCache", "no pip", f"install pip, {by_hand}")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        requirement = Path(folder, "pin.txt")
        requirement.write_text(
            f"{upstream.name}=={upstream.version} --hash=sha256:{upstream.sha256}\n",
            encoding="utf-8",
        )
        command = [sys.executable, "-m", "pip", "download", "--quiet"]
        command += ["--no-deps", "--no-binary", upstream.name, "--no-build-isolation"]
        command += ["--require-hashes", "--dest", folder, "-r", str(requirement)]
        # pip reads the metadata by running LMCache's setup.py: no need to compile
        # for it. The outer pip's record of running builds is not ours to share.
        environ = {**os.environ, "NO_NATIVE_EXT": "1"}
        environ.pop("PIP_BUILD_TRACKER", None)
        print(f"downloading {upstream.name} {upstream.version}", flush=True)
        if subprocess.run(command, env=environ, check=False).returncode != 0:
            raise fail(
                f"{upstream.name} {upstream.version} from pip",
                "the error above",
                f"give pip a package index, {by_hand}",
            )
        (archive,) = Path(folder).glob("*.tar.gz")
        check_hash(archive, upstream, "pip")
        os.replace(archive, kept)
    return kept


def unpack(upstream: Upstream, target: Path, cache: Path) -> None:
    """Put the LMCache sources into ``target``.

    Args:
        upstream: The pin.
        target: Folder to make.
        cache: Folder that keeps the download.

    Raises:
        SystemExit: ``LMCACHE_SDIST`` names nothing usable, or a hash differs.
    """
    given = os.environ.get("LMCACHE_SDIST")
    source = Path(given).expanduser() if given else download(upstream, cache)
    if given and source.is_dir():
        if not (source / "lmcache" / "__init__.py").is_file():
            raise fail("an LMCache checkout", str(source), "correct LMCACHE_SDIST")
        print(f"using the checkout {source}: only replaced files are hash-checked")
        junk = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.so", *LITTER)
        shutil.copytree(source, target, symlinks=True, ignore=junk)
        return
    if not source.is_file():
        raise fail("an sdist or a checkout", f"LMCACHE_SDIST={given}", "correct it")
    check_hash(source, upstream, str(source))
    with tarfile.open(source) as archive:
        archive.extractall(target.parent, filter="data")
    (target.parent / f"{upstream.name}-{upstream.version}").rename(target)


def write_torch_record(stage: Path) -> None:
    """Note in the stage which torch the native extensions are compiled for."""
    import torch

    path = stage / TORCH_RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "# SPDX-License-Identifier: Apache-2.0\n"
        '"""Written by setup.py when this LMCache was built."""\n\n'
        f"TORCH_VERSION = {torch.__version__!r}\n",
        encoding="utf-8",
    )


def stage_key(upstream: Upstream, *, editable: bool) -> str:
    """Return a hash over all that a stage is made from.

    Args:
        upstream: The pin.
        editable: Our files are links: of them only the names count.
    """
    import torch

    digest = hashlib.sha256(f"{torch.__version__} {upstream.sha256}".encode())
    for name in ("setup.py", "setup_extensions/lmcache_overlay.py", "upstream.toml"):
        digest.update((ROOT / name).read_bytes())
    for path in sorted((ROOT / PATCHES).rglob("*.patch")):
        digest.update(b"\0" + path.read_bytes())
    for name in our_files(ROOT, SHIPPED):
        digest.update(b"\0" + name.encode())
        if not editable:
            digest.update(b"\0" + sha256_of(ROOT / name).encode())
    return digest.hexdigest()


def make_stage(upstream: Upstream, cache: Path, *, editable: bool) -> Path:
    """Make the folder in which LMCache's own ``setup.py`` runs.

    A stage that is still right is used again, so that a running process can go on
    importing from an editable one.

    Args:
        upstream: The pin and the declarations.
        cache: Folder that keeps the download.
        editable: Make the stage that an editable install imports from: our files are
            links. Else they are copies.

    Returns:
        The stage, without the results of an earlier build.

    Raises:
        SystemExit: Anything is not as declared; an existing stage stays as it was.
    """
    kind = "editable" if editable else "wheel"
    stage = BUILD / "-".join(filter(None, (kind, upstream.release)))
    stamp, key = stage / ".stage-key", stage_key(upstream, editable=editable)
    right = stamp.is_file() and stamp.read_text(encoding="utf-8") == key
    if right and not os.environ.get("LMCACHE_SDIST"):
        shutil.rmtree(stage / "build", ignore_errors=True)
        return stage
    with tempfile.TemporaryDirectory(dir=BUILD, prefix="stage-") as folder:
        fresh = Path(folder, "lmcache")
        unpack(upstream, fresh, cache)
        check_collisions(upstream, ROOT, fresh)
        lay_over(upstream, ROOT, fresh, link=editable)
        apply_patches(ROOT, fresh, upstream.release)
        change_requirements(upstream, fresh)
        write_torch_record(fresh)
        if editable:
            # The default finder of editable installs lets an `lmcache` folder in the
            # working directory, such as ours, hide the installed package.
            with (fresh / "setup.cfg").open("a", encoding="utf-8") as config:
                config.write("\n[editable_wheel]\nmode = compat\n")
        if not os.environ.get("LMCACHE_SDIST"):
            (fresh / stamp.name).write_text(key, encoding="utf-8")
        if stage.exists():
            stage.rename(Path(folder, "old"))
        fresh.rename(stage)
    return stage


# ---- running ------------------------------------------------------------------------


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep two builds of one checkout from sharing a stage."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another build of this checkout", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build(upstream: Upstream, commands: set[str]) -> None:
    """Stage LMCache with our files and run its own ``setup.py`` on this command line.

    Args:
        upstream: The pin and the declarations.
        commands: The words of the command line.

    Raises:
        SystemExit: The build is refused; see the message.
    """
    check_tools()
    check_profile(os.environ)
    # torch loads its device backends on import; torch_rbln's fails without a runtime.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    # Named outright, so that an nvcc on PATH does not make it a CUDA build.
    os.environ["BUILD_WITH_RBLN"] = "1"
    cache = Path(os.environ.get("LMCACHE_BUILD_CACHE") or BUILD / "cache").absolute()
    os.environ["LMCACHE_BUILD_CACHE"] = str(cache)
    with locked(BUILD / ".lock"):
        editable = bool(commands & {"develop", "editable_wheel"})
        stage = make_stage(upstream, cache, editable=editable)
        # Not earlier: the download must still find LMCache under its own version.
        variable = f"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_{upstream.name.upper()}"
        os.environ[variable] = upstream.full_version
        os.chdir(stage)
        try:
            runpy.run_path(str(stage / "setup.py"), run_name="__main__")
        finally:
            os.chdir(ROOT)


class Sdist(sdist):
    """``sdist`` without the egg-info, which setuptools adds after ``MANIFEST.in``."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Lay out the files of the sdist."""
        ours = [name for name in files if not name.startswith(f"{BUILD.name}/")]
        super().make_release_tree(base_dir, ours)


def describe(upstream: Upstream) -> None:
    """Run a command that is about this repository alone, such as ``sdist``."""
    # In the checkout itself an egg-info folder would look like an installed lmcache
    # to every Python that is started there.
    egg_base = BUILD / "egg-info"
    egg_base.mkdir(parents=True, exist_ok=True)
    setuptools.setup(
        version=upstream.full_version,
        packages=[],
        py_modules=[],
        cmdclass={"sdist": Sdist},
        options={"egg_info": {"egg_base": str(egg_base.relative_to(ROOT))}},
    )


def release_asked_for() -> str:
    """Return what ``LMCACHE`` says, or else which release this sdist was made for."""
    info = ROOT / "PKG-INFO"
    if "LMCACHE" not in os.environ and info.is_file():
        second = Upstream.load(ROOT / "upstream.toml", NEXT).full_version
        return NEXT if f"\nVersion: {second}\n" in info.read_text("utf-8") else ""
    return os.environ.get("LMCACHE", "")


if __name__ == "__main__":
    pin = Upstream.load(ROOT / "upstream.toml", release_asked_for())
    words = set(sys.argv[1:])
    if words & BUILD_COMMANDS:
        build(pin, words)
    else:
        describe(pin)
