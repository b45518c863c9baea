# SPDX-License-Identifier: Apache-2.0
"""Installed packages and whether they fit, by their own metadata."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any
import re

# Local
from lmcache_rbln.diagnose.result import Result, fail, ok, one_line, skip, warn

#: The stack, from the bottom. Each is fitted to what the others ask for.
STACK = (
    "torch",
    "torch-rbln",
    "rebel-compiler",
    "vllm",
    "vllm-rbln",
    "lmcache",
    "lmcache-rbln",
)
# Extras under which the packages name each other.
_EXTRAS = ("", "runtime", "kv-connectors")
_FROM = {
    "torch": " --index-url https://download.pytorch.org/whl/cpu",
    "rebel-compiler": " from the RBLN package index (needs an RBLN Portal account)",
}


@dataclass(frozen=True)
class Package:
    """An installed distribution.

    Attributes:
        version: Its version; None if it is not installed.
        requires: Its requirements, as in its metadata.
        problem: Why its metadata can't be read, or empty.
    """

    version: str | None
    requires: Sequence[str] = ()
    problem: str = ""


def installed(name: str) -> Package:
    """Read a distribution's metadata; never raises."""
    try:
        found = metadata.distribution(name)
        version = found.version
        requires = found.requires or ()
    except metadata.PackageNotFoundError:
        return Package(None)
    except Exception as error:
        return Package(None, problem=one_line(error) or type(error).__name__)
    if not version:
        return Package(None, problem="its metadata has no version")
    return Package(version, tuple(requires))


def wishes(name: str, packages: Mapping[str, Package]) -> list[tuple[str, str]]:
    """Collect what the packages of the stack ask of one of them.

    Args:
        name: The package asked for.
        packages: The stack.

    Returns:
        Pairs of who asks (name and version) and the versions it accepts, for example
        ``("torch-rbln 0.12.0", "==2.13.0+cpu")``. Requirements without versions or for
        other machines are left out.
    """
    # Third Party
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    found = []
    for asker, package in packages.items():
        for text in package.requires:
            try:
                wish = Requirement(text)
            except InvalidRequirement:
                continue
            if canonicalize_name(wish.name) != name or not wish.specifier:
                continue
            if wish.marker is None or any(
                wish.marker.evaluate({"extra": extra}) for extra in _EXTRAS
            ):
                found.append((f"{asker} {package.version}", str(wish.specifier)))
    return sorted(set(found))


def check_package(
    name: str, packages: Mapping[str, Package], simulated: bool = False
) -> Result:
    """Check that a package is there and that the others accept its version.

    Args:
        name: The package.
        packages: The stack.
        simulated: Whether the NPU runtime is a simulator, which takes the place of
            rebel-compiler.
    """
    try:
        # Third Party
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion, Version
    except ImportError:
        return warn(
            name,
            f"{packages[name].version}; not compared",
            "the Python package packaging, to compare versions",
            "pip install packaging",
        )
    package = packages[name]
    asked = wishes(name, packages)
    wanted = "; ".join(f"{name}{versions} ({asker})" for asker, versions in asked)
    versions = ",".join(dict.fromkeys(versions for _, versions in asked))
    fix = f"pip install '{name}{versions}'{_FROM.get(name, '')}"
    if name == "lmcache":
        pin = re.search(r"[=>]=([^,+]+)", versions)
        fix = (
            f"pip install lmcache=={pin[1] if pin else 'VERSION'}+rbln --find-links DIR"
        )
    if package.problem:
        return fail(name, f"unreadable: {package.problem}", wanted or name, fix)
    if package.version is None:
        if name == "rebel-compiler" and simulated:
            return skip(name, "not installed; a simulated runtime takes its place")
        return fail(name, "not installed", wanted or name, fix)
    try:
        version = Version(package.version)
    except InvalidVersion:
        return fail(name, f"{package.version}: not a version", wanted or name, fix)
    misfits = [
        f"{name}{versions} ({asker})"
        for asker, versions in asked
        if not SpecifierSet(versions).contains(version, prereleases=True)
    ]
    if misfits:
        return fail(name, package.version, "; ".join(misfits), fix)
    if name == "lmcache" and not (version.local or "").startswith("rbln"):
        return fail(
            name,
            f"{package.version}: not an RBLN build",
            "a build with the local version +rbln",
            fix,
        )
    return ok(name, package.version, wishes=[f"{a}: {v}" for a, v in asked])


def check_build(facts: Mapping[str, Any]) -> Result:
    """Check that LMCache's native extensions load and are of the installed torch.

    Args:
        facts: The topic ``build`` of the LMCache probe.
    """
    name = "LMCache build"
    wanted = "native extensions that load into the installed torch"
    fix = (
        "install the lmcache +rbln wheel for this torch, or build LMCache again where "
        "this torch is installed"
    )
    if facts.get("error"):
        return fail(name, one_line(facts["error"]), wanted, fix)
    broken: dict[str, str] = facts.get("broken", {})
    built_for = facts.get("built_for")
    running = facts.get("torch")
    if built_for and built_for != running:
        return fail(
            name,
            f"built for torch {built_for}, torch {running} is installed",
            f"torch {built_for}",
            fix,
        )
    if broken:
        shown = "; ".join(f"{one}: {why}" for one, why in broken.items())
        return fail(name, one_line(shown), wanted, fix)
    loaded = facts.get("loaded", [])
    if not loaded:
        return fail(name, "no native extension", wanted, fix)
    if not built_for:
        return fail(
            name,
            "the RBLN backend has no record of the torch it was built for",
            "LMCache with the RBLN backend of the +rbln wheel",
            fix,
        )
    return ok(name, f"{len(loaded)} native extensions load, built for torch {running}")
