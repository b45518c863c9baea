# SPDX-License-Identifier: Apache-2.0
"""Move the pin of LMCache to another release, and tell what to look at.

    make bump VERSION=X.Y.Z          # or: python tools/bump_upstream.py X.Y.Z

Fetches both releases, writes the new version and hash wherever the old ones stand, and
prints what the new release changes of what this repository builds on. Nothing is
imported from either release: they are compared as text. ``--report`` only reports.
``--next`` is about the second pin. ``--swap`` needs no version: the two pins change
places, and with them what is their own in ``patches/``.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "setup_extensions"))
import lmcache_overlay as overlay  # noqa: E402
from packaging.version import Version  # noqa: E402

sys.path.pop(0)

SDISTS = ROOT / "build" / "cache" / "sdist"
RELEASES = ("", overlay.NEXT)
#: What happened stays as it was written.
HISTORY = {"CHANGELOG.md"}
TEXT = {".cfg", ".md", ".patch", ".py", ".rst", ".sh", ".toml", ".txt", ".yml", ""}
#: A literal of ours is one of LMCache's messages if LMCache has a part of it between
#: two values that is at least this long.
MESSAGE_LENGTH = 12
METRIC = re.compile(r"\b(?:lmcache|vllm)[:_][a-z0-9_:]+\b")


def fetch(name: str, version: str) -> Path:
    """Return the sdist of a release, downloaded by pip if it is not kept already.

    Args:
        name: Distribution.
        version: Its release.

    Raises:
        SystemExit: pip has no such release.
    """
    kept = SDISTS / f"{name}-{version}.tar.gz"
    if kept.exists():
        return kept
    SDISTS.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--pre"]
    command += ["--no-binary", name, "--no-build-isolation", "--dest", str(SDISTS)]
    environ = {**os.environ, "NO_NATIVE_EXT": "1"}
    done = subprocess.run([*command, f"{name}=={version}"], env=environ, check=False)
    if done.returncode != 0 or not kept.exists():
        raise overlay.fail(
            f"{name} {version} from pip",
            "the error above",
            "name a release that it has",
        )
    return kept


def unpacked(archive: Path, folder: Path) -> Path:
    """Unpack a release into ``folder`` and return its root."""
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


# ---- the pin -------------------------------------------------------------------------


def tracked(root: Path) -> list[Path]:
    """Return the text files that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True
    )
    paths = [root / name for name in listed.stdout.split("\0") if name]
    return [p for p in paths if p.suffix in TEXT and p.is_file() and not p.is_symlink()]


def move_pin(paths: Iterable[Path], words: Mapping[str, str]) -> int:
    """Write new versions and hashes in place of old ones.

    Args:
        paths: Files to change.
        words: What to find, and what to write for each.

    Returns:
        How many files changed.
    """
    # Not as a part of a longer version, such as 10.5.6 or 0.5.61.
    any_word = "|".join(map(re.escape, words))
    whole = re.compile(rf"(?<![\w.])(?:{any_word})(?![0-9a-z]|\.\d)")
    changed = 0
    for path in paths:
        if path.name in HISTORY:
            continue
        before = path.read_text(encoding="utf-8")
        text = whole.sub(lambda found: words[found[0]], before)
        # The range of both pins, which a swap turns round.
        for low, high in re.findall(r">=([\w.]+),<=([\w.]+)", text):
            if Version(low) > Version(high):
                text = text.replace(f">={low},<={high}", f">={high},<={low}")
        if text != before:
            path.write_text(text, encoding="utf-8")
            changed += 1
    return changed


def swap_patches(folder: Path) -> None:
    """Let what the two releases have for themselves in ``patches/`` change places."""
    for path in sorted((folder / overlay.NEXT).glob("*.patch")):
        shared, own = map(overlay.patch_sections, (folder / path.name, path))
        write_patch(folder / path.name, shared | own, path)
        write_patch(path, {name: shared.get(name, "") for name in own}, path)


def write_patch(path: Path, sections: Mapping[str, str], reason: Path) -> None:
    """Write hunks by file below the reason that ``path`` gives, or else ``reason``."""
    text = (path if path.is_file() else reason).read_text(encoding="utf-8")
    parts = [f"--- a/{name}\n+++ b/{name}\n{sections[name]}" for name in sections]
    head = text[: text.index("\n--- a/") + 1]
    path.write_text(head + "".join(parts), encoding="utf-8")


# ---- what the new release changes ----------------------------------------------------


def overlay_findings(pin: overlay.Upstream, old: Path, new: Path) -> Iterator[str]:
    """Compare what we own, replace and patch."""
    try:
        overlay.check_collisions(pin, ROOT, new)
    except SystemExit as error:
        yield str(error)
    for name, sections in overlay.patches(ROOT, new, pin.release).items():
        problem = overlay.patch_problem("".join(sections.values()), new)
        if problem:
            yield f"{overlay.PATCHES}/{name} no longer fits: {problem}"
    for folder in pin.owned:
        for name in sorted(names_below(old, folder) | names_below(new, folder)):
            if content(old / name) != content(new / name):
                yield f"{name}: theirs changed; we have our own in its place"


def names_below(root: Path, folder: str) -> set[str]:
    """Return the files below a folder, relative to ``root``."""
    found = (root / folder).rglob("*")
    return {path.relative_to(root).as_posix() for path in found if path.is_file()}


def content(path: Path) -> bytes | None:
    """Return what a file holds; None if it is not there."""
    return path.read_bytes() if path.is_file() else None


def uses(paths: Iterable[Path]) -> set[tuple[str, str]]:
    """Return module and name of everything that our Python files import of LMCache."""
    found = set()
    for path in paths:
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level:
                module = node.module or ""
                if module.split(".")[0] == "lmcache":
                    found |= {(module, alias.name) for alias in node.names}
    return found


def definitions(root: Path) -> dict[str, dict[str, ast.stmt | None]]:
    """Return what each module of a release defines at its top level."""
    found: dict[str, dict[str, ast.stmt | None]] = {}
    for path in (root / "lmcache").rglob("*.py"):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names: dict[str, ast.stmt | None] = {}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names.update((a.asname or a.name, None) for a in node.names)
        for node in tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                names[node.name] = node
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = (
                    node.targets if isinstance(node, ast.Assign) else [node.target]
                )
                names.update((t.id, node) for t in targets if isinstance(t, ast.Name))
        found[module.removesuffix(".__init__")] = names
    return found


def signatures(node: ast.stmt | None) -> dict[str, str]:
    """Return functions with decorators and arguments, and fields with their types."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        marks = "".join(f"@{ast.unparse(mark)} " for mark in node.decorator_list)
        return {node.name: f"{marks}({ast.unparse(node.args)})"}
    if not isinstance(node, ast.ClassDef):
        return {}
    found: dict[str, str] = {}
    for inner in node.body:
        if isinstance(inner, ast.AnnAssign):
            found[ast.unparse(inner.target)] = f": {ast.unparse(inner.annotation)}"
        elif not isinstance(inner, ast.ClassDef):
            found |= signatures(inner)
    return found


def interface_findings(
    used: set[tuple[str, str]], old: Path, new: Path
) -> Iterator[str]:
    """Compare what we import of LMCache: is it there, with the same functions?"""
    before, after = definitions(old), definitions(new)
    for module, name in sorted(used):
        if f"{module}.{name}" in before:  # a module
            module, name = f"{module}.{name}", ""
        if module not in before or (name and name not in before[module]):
            continue  # a file of ours, or native
        if module not in after or (name and name not in after[module]):
            last = name or module.rpartition(".")[2]
            places = [
                m
                for m, names in after.items()
                if (names.get(name) if name else m.endswith(f".{last}"))
            ]
            yield f"{module}.{name} is gone; now: {', '.join(sorted(places)) or 'none'}"
            continue
        if not name:
            continue
        then, now = signatures(before[module][name]), signatures(after[module][name])
        for function in sorted(then.keys() | now.keys()):
            if then.get(function) != now.get(function):
                was, is_ = then.get(function, " absent"), now.get(function, " absent")
                yield f"{module}.{name}: {function}{was} -> {function}{is_}"


def literals(paths: Iterable[Path]) -> set[str]:
    """Return what our documents and whatever is no product of ours quote."""
    found: set[str] = set()
    for path in paths:
        text = path.read_text(encoding="utf-8")
        harness = {"benchmarks", "examples", "tests"}.intersection(path.parts)
        if path.suffix == ".py" and harness:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
        elif path.suffix in (".md", ".rst"):
            found |= set(re.findall(r"`+([^`\n]+)`+", text))
            found |= set(METRIC.findall(text))
    return found


def message_findings(quoted: set[str], old: Path, new: Path) -> Iterator[str]:
    """Name quoted log lines and metrics that LMCache had and has no more."""
    before, after = (
        "\n".join(
            re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
            for path in (root / "lmcache").rglob("*.py")
        )
        for root in (old, new)
    )
    for text in sorted(quoted):
        for part in re.split(r"%\w|\{.*?\}|\d+|\bN\b|\n", text):
            part = part.strip(" .:,'\"")
            long = len(part) >= MESSAGE_LENGTH and " " in part
            if (
                (long or METRIC.fullmatch(part))
                and part in before
                and part not in after
            ):
                yield f"{part!r} (in {text[:60]!r})"


def main(words: list[str] | None = None) -> int:
    """Run the command line and return the exit code: 1 if there is anything to do."""
    parser = argparse.ArgumentParser(description="Move the pin of LMCache.")
    parser.add_argument("version", nargs="?", help="the release to move to")
    parser.add_argument("--report", action="store_true", help="report, change nothing")
    parser.add_argument("--next", action="store_true", help="move the second pin")
    parser.add_argument("--swap", action="store_true", help="swap the two pins")
    options = parser.parse_args(words)
    if options.swap == bool(options.version):
        parser.error("give either the release to move to or --swap")
    pins = [overlay.Upstream.load(ROOT / "upstream.toml", r) for r in RELEASES]
    if options.swap:
        one, other = ((pin.version, pin.sha256) for pin in pins)
        words_of = dict(zip(one + other, other + one, strict=True))
        changed = move_pin(tracked(ROOT), words_of)
        swap_patches(ROOT / overlay.PATCHES)
        print(f"{one[0]} and {other[0]} changed places in {changed} files")
        return 0
    pin = pins[options.next]
    if options.version == pins[not options.next].version:
        parser.error(f"{options.version} is the other pin: --swap makes it this one")
    archives = [fetch(pin.name, version) for version in (pin.version, options.version)]
    sha256 = overlay.sha256_of(archives[1])
    ours = tracked(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        old, new = (unpacked(archive, Path(folder)) for archive in archives)
        sections = {
            "files that we own, replace or patch": overlay_findings(pin, old, new),
            "interfaces that we use": interface_findings(uses(ours), old, new),
            "log lines and metrics that we quote": message_findings(
                literals(ours), old, new
            ),
        }
        found = 0
        for title, findings in sections.items():
            lines = list(findings)
            found += len(lines)
            print(f"{title}: {len(lines) or 'nothing changed'}")
            for line in lines:
                print(f"  - {line}")
    if not options.report:
        words_of = {pin.version: options.version, pin.sha256: sha256}
        changed = move_pin(ours, words_of)
        print(f"the pin stands in {changed} files: {pin.version} -> {options.version}")
    print(f"{pin.name} {options.version} has sha256 {sha256}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
