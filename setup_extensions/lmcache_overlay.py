# SPDX-License-Identifier: Apache-2.0
"""What this repository adds to LMCache and replaces in it, and how it is laid over it.

``upstream.toml`` declares it, ``setup.py`` uses this module for every build.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

if sys.version_info >= (3, 11):
    import tomllib
else:
    from setuptools.compat.py310 import tomllib

# Top-level folders whose files go into the stage, and those that only share LMCache's
# paths: they are checked for undeclared collisions and never get into a wheel.
SHIPPED = ("csrc", "lmcache", "requirements", "setup_extensions")
COMPARED = (".buildkite", "benchmarks", "docs", "examples", "tests")
# Changes inside of files that stay LMCache's.
PATCHES = "patches"
# The second pin, and the folder of PATCHES with what differs in it.
NEXT = "next"
SPDX = "SPDX-License-Identifier: Apache-2.0"
LITTER = {"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


def fail(wanted: str, got: str, fix: str) -> SystemExit:
    """Return the exception that stops the build with one readable message."""
    return SystemExit(f"error: wanted {wanted}; got {got}.\n       Fix: {fix}.")


@dataclass(frozen=True)
class Upstream:
    """A pin and the declared differences, as read from ``upstream.toml``."""

    release: str
    name: str
    version: str
    sha256: str
    local_version: str
    owned: tuple[str, ...]
    replaced: dict[str, str]
    dropped: frozenset[str]
    relaxed: dict[str, str]

    @classmethod
    def load(cls, path: Path, release: str = "") -> Upstream:
        """Read ``upstream.toml``.

        Args:
            path: The file to read.
            release: Whose pin: ``""`` is the default one, ``next`` the second.

        Returns:
            Its content.

        Raises:
            SystemExit: There is no such pin, or a path is declared twice.
        """
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        if release and (release != NEXT or release not in data):
            raise fail(
                f"no LMCACHE, or LMCACHE={NEXT} and a table [{NEXT}] in {path.name}",
                f"LMCACHE={release}",
                "unset LMCACHE for the default release",
            )
        pin, requirements = (
            data["upstream"] | data.get(release, {}),
            data["requirements"],
        )
        entries = data.get("replaced", [])
        replaced = {entry["path"]: entry["sha256"] for entry in entries}
        owned = tuple(data["owned"]["folders"])
        for name in replaced:
            twice = [e["path"] for e in entries].count(name) > 1
            if twice or any(is_below(name, folder) for folder in owned):
                raise fail(
                    f"each path declared once in {path.name}",
                    f"{name} twice, or inside an owned folder",
                    "remove one of the declarations",
                )
        return cls(
            release=release,
            name=pin["name"],
            version=pin["version"],
            sha256=pin["sha256"],
            local_version=pin["local_version"],
            owned=owned,
            replaced=replaced,
            dropped=frozenset(normalized(name) for name in requirements["drop"]),
            relaxed={normalized(k): v for k, v in requirements["relax"].items()},
        )

    @property
    def full_version(self) -> str:
        """Version of the wheel, for example ``0.5.6+rbln``."""
        return f"{self.version}+{self.local_version}"


def normalized(name: str) -> str:
    """Return a distribution name in the form in which names compare equal."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_below(name: str, folder: str) -> bool:
    """Tell whether the relative path ``name`` is ``folder`` or lies below it."""
    return PurePosixPath(name).is_relative_to(folder)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def our_files(root: Path, folders: tuple[str, ...]) -> list[str]:
    """List the files of this repository below some of its folders.

    Args:
        root: This repository.
        folders: Folders in it; those that do not exist hold nothing.

    Returns:
        Paths relative to ``root``, sorted, without caches and compiled files.
    """
    names = []
    for folder in folders:
        for path in (root / folder).rglob("*"):
            name = path.relative_to(root)
            litter = LITTER.intersection(name.parts) or name.suffix in (".pyc", ".so")
            if path.is_file() and not litter:
                names.append(name.as_posix())
    return sorted(names)


def check_collisions(upstream: Upstream, root: Path, stage: Path) -> None:
    """Refuse collisions that ``upstream.toml`` does not declare.

    Args:
        upstream: The declarations.
        root: This repository.
        stage: Unpacked LMCache, nothing of ours in it yet.

    Raises:
        SystemExit: A file of ours takes the place of an undeclared one, a replaced
            file is not the one that was declared, or a declaration has no file.
    """
    for name in our_files(root, SHIPPED + COMPARED):
        owned = any(is_below(name, folder) for folder in upstream.owned)
        if (stage / name).exists() and not owned and name not in upstream.replaced:
            raise fail(
                "every file that takes the place of one of LMCache's declared",
                f"{name}, which LMCache {upstream.version} has too",
                "move it, or declare it in upstream.toml with sha256 = "
                f'"{sha256_of(stage / name)}"',
            )
    for name, sha256 in upstream.replaced.items():
        shipped = name.split("/")[0] in SHIPPED
        got = sha256_of(stage / name) if (stage / name).is_file() else "no such file"
        if got != sha256:
            raise fail(
                f"{name} of LMCache with sha256 {sha256}",
                got,
                "compare our file with LMCache's, then correct upstream.toml",
            )
        if shipped and not (root / name).is_file():
            raise fail(f"our {name}", "no such file", "remove it from upstream.toml")
    for folder in upstream.owned:
        if folder.split("/")[0] in SHIPPED and not our_files(root, (folder,)):
            raise fail(f"files of ours in {folder}", "none", "see upstream.toml")


def lay_over(upstream: Upstream, root: Path, stage: Path, *, link: bool) -> None:
    """Drop what we own from the stage and put our files there.

    What is only compared goes too: an editable install puts the stage on Python's path,
    where LMCache's package ``tests`` would hide ours.

    Args:
        upstream: The declarations.
        root: This repository.
        stage: Unpacked LMCache.
        link: Link to the files of this repository instead of copying them.
    """
    for folder in upstream.owned + COMPARED:
        shutil.rmtree(stage / folder, ignore_errors=True)
    for name in our_files(root, SHIPPED):
        target = stage / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        if link:
            target.symlink_to(root / name)
        else:
            shutil.copy2(root / name, target)


def base_name(name: str) -> str:
    """Return where LMCache 0.5.6 has a file that later releases moved."""
    return name.replace("lmcache/inprocess/", "lmcache/", 1)


def patch_sections(path: Path) -> dict[str, str]:
    """Return the hunks of a patch for each file, by :func:`base_name`.

    Args:
        path: The patch; one that is not there changes nothing.

    Raises:
        SystemExit: A file is named twice.
    """
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    parts = re.split(r"^--- a/(\S+).*\n\+\+\+ .*\n", text, flags=re.MULTILINE)
    names = [base_name(name) for name in parts[1::2]]
    if len(set(names)) != len(names):
        raise fail("each file named once in a patch", f"{path}", "join its hunks")
    return dict(zip(names, parts[2::2], strict=True))


def patches(root: Path, stage: Path, release: str) -> dict[str, dict[str, str]]:
    """Return the changes of a release of LMCache.

    What a patch of the same name in ``patches/next`` says of a file takes the place of
    the hunks for the default release: none leave the file as it is.

    Args:
        root: This repository.
        stage: LMCache. Files of its in-process engine are found where it has them.
        release: As for :meth:`Upstream.load`.

    Returns:
        By name of the patch and of the file in the stage, a patch of that file.
    """
    folders = [root / PATCHES, *([root / PATCHES / release] if release else [])]
    found: dict[str, dict[str, str]] = {}
    for name in sorted({path.name for f in folders for path in f.glob("*.patch")}):
        sections: dict[str, str] = {}
        for folder in folders:
            sections |= patch_sections(folder / name)
        found[name] = {}
        for file, hunks in sections.items():
            moved = file.replace("lmcache/", "lmcache/inprocess/", 1)
            place = moved if (stage / moved).is_file() else file
            if hunks.strip():
                found[name][place] = f"--- a/{place}\n+++ b/{place}\n{hunks}"
    return found


def apply_patches(root: Path, stage: Path, release: str = "") -> None:
    """Change LMCache's own files as ``patches/`` says, in order of the patches' names.

    Args:
        root: This repository.
        stage: LMCache with our files laid over it.
        release: As in :class:`Upstream`.

    Raises:
        SystemExit: The program ``patch`` is missing, a patch gives no reason, changes a
            file of ours or does not fit LMCache's to the letter.
    """
    for path in sorted((root / PATCHES).rglob("*.patch")):
        reason, _, _ = path.read_text(encoding="utf-8").partition("\n--- ")
        if not reason.removeprefix(SPDX).strip():
            raise fail(
                f"the reason for a change of LMCache at the top of {path.name}",
                "none",
                "say what it does and why LMCache's users need it",
            )
    for patch, sections in patches(root, stage, release).items():
        for name in sections:
            if (root / name).exists():
                raise fail(
                    "only files of LMCache patched",
                    f"{name}, which is ours, in {patch}",
                    "change our file, and take it out of the patch",
                )
        problem = patch_problem("".join(sections.values()), stage)
        if problem:
            raise fail(
                f"{PATCHES}/{patch} to fit LMCache's files",
                f"\n{problem}",
                "compare the patch with those files",
            )


def patch_problem(text: str, stage: Path) -> str:
    """Apply a patch, or tell why it does not fit.

    Args:
        text: The patch.
        stage: LMCache.

    Returns:
        What the program ``patch`` says; empty if the patch is applied.

    Raises:
        SystemExit: There is no such program.
    """
    if not text:
        return ""
    # No fuzz: what merely looks like the place may not be it any more.
    command = ["patch", "--strip=1", "--fuzz=0", "--batch", "--forward"]
    command += ["--no-backup-if-mismatch", "--reject-file=-"]
    try:
        done = subprocess.run(
            [*command, f"--directory={stage}"],
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise fail(
            "the program patch, to change LMCache's files",
            "none on PATH",
            "install it (Debian and Ubuntu: apt-get install patch)",
        ) from error
    return done.stdout.rstrip() if done.returncode else ""


def change_requirements(upstream: Upstream, stage: Path) -> None:
    """Apply the declared changes to LMCache's list of requirements.

    Args:
        upstream: The declarations.
        stage: Unpacked LMCache; ``requirements/common.txt`` is rewritten.

    Raises:
        SystemExit: A declared requirement is not in LMCache's list.
    """
    path = stage / "requirements" / "common.txt"
    unseen = upstream.dropped | upstream.relaxed.keys()
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line.strip())
        name = normalized(match[0]) if match else ""
        unseen -= {name}
        if name in upstream.dropped:
            continue
        relaxed = upstream.relaxed.get(name)
        lines.append(line if relaxed is None else name + relaxed)
    if unseen:
        raise fail(
            "the requirements named in upstream.toml in LMCache's own list",
            f"no {', '.join(sorted(unseen))} there",
            "remove them from upstream.toml",
        )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
