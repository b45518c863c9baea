# SPDX-License-Identifier: Apache-2.0
"""Installed packages and whether they fit, by their own metadata."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any
import re

# Local
from lmcache_rbln.diagnose.probe import explain
from lmcache_rbln.diagnose.report import FAIL, OK, SKIP, Result, one_line

#: The stack, from the bottom. Each is fitted to what the others ask for.
STACK = (
    *("torch", "torch-rbln", "rebel-compiler", "vllm", "vllm-rbln"),
    *("lmcache", "lmcache-rbln"),
)
# Extras under which the packages name each other.
_EXTRAS = ("", "runtime", "kv-connectors")
_FROM = {
    "torch": " --index-url https://download.pytorch.org/whl/cpu",
    "rebel-compiler": " from the RBLN package index (needs an RBLN Portal account)",
}
#: Version and requirements of each package that is installed.
Packages = Mapping[str, tuple[str, Sequence[str]]]


def installed() -> Packages:
    """Return the packages of the stack that are installed with readable metadata."""
    found = {}
    for name in STACK:
        try:
            one = metadata.distribution(name)
            found[name] = (str(one.metadata["Version"]), one.requires or ())
        except Exception:
            continue  # broken, which is as good as missing
    return found


def check_package(name: str, packages: Packages, simulated: bool) -> Result:
    """Check that a package is there and that the others accept its version.

    Args:
        name: The package.
        packages: The stack.
        simulated: Whether the NPU runtime is a simulator, which takes the place of
            rebel-compiler.
    """
    # Third Party
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    if name == "rebel-compiler" and simulated and name not in packages:
        return Result(SKIP, "not installed; a simulated runtime takes its place")
    found, _ = packages.get(name, ("not installed", ()))
    misfits, versions = [], set()
    for asker, (asking, requires) in packages.items():
        for one in map(Requirement, requires):
            if canonicalize_name(one.name) != name or not one.specifier:
                continue
            if one.marker is None or any(
                one.marker.evaluate({"extra": extra}) for extra in _EXTRAS
            ):
                versions.add(str(one.specifier))
                if name not in packages or not one.specifier.contains(found, True):
                    misfits.append(f"{name}{one.specifier} ({asker} {asking})")
    fix = f"pip install '{name}{','.join(sorted(versions))}'{_FROM.get(name, '')}"
    if name == "lmcache":
        named = re.search(r"[=>]=([^,+]+)", ",".join(versions))
        pin = named[1] if named else "VERSION"
        fix = f"pip install lmcache=={pin}+rbln --find-links DIR"
        if name in packages and "+rbln" not in found:
            found += ": not an RBLN build"
            misfits.append("a build with the local version +rbln")
    if misfits or name not in packages:
        return Result(FAIL, found, "; ".join(misfits) or name, fix)
    return Result(OK, found)


def examine_build() -> dict[str, Any]:
    """Import torch and every native extension of LMCache; runs in a probe.

    Returns:
        ``torch``, the version ``built_for`` (or None), the extensions that are
        ``loaded``, and why others are ``broken``.
    """
    # Third Party
    import torch

    spec = util.find_spec("lmcache")
    if spec is None or not spec.origin:
        raise ModuleNotFoundError("there is no package lmcache")
    built_for, loaded, broken = None, [], {}
    with suppress(Exception):
        record = import_module("lmcache.v1.platform.devices.rbln.built_with")
        built_for = record.TORCH_VERSION
    for path in sorted(Path(spec.origin).parent.glob("*.so")):
        name = path.name.split(".")[0]
        try:
            import_module(f"lmcache.{name}")
            loaded.append(name)
        except Exception as error:
            broken[name] = explain(error)
    facts = {"built_for": built_for, "loaded": loaded, "broken": broken}
    return {"torch": str(torch.__version__), **facts}


def check_build(facts: Mapping[str, Any]) -> Result:
    """Check that LMCache's native extensions load and are of the installed torch.

    Args:
        facts: What :func:`examine_build` returned, or ``error``.
    """
    built_for, running = facts.get("built_for"), facts.get("torch")
    if facts.get("error"):
        found = one_line(facts["error"])
    elif not built_for:
        found = "the RBLN backend has no record of the torch it was built for"
    elif built_for != running:
        found = f"built for torch {built_for}, torch {running} is installed"
    elif facts["broken"]:
        broken = (f"{one}: {why}" for one, why in facts["broken"].items())
        found = one_line("; ".join(broken))
    elif not facts["loaded"]:
        found = "no native extension"
    else:
        number = len(facts["loaded"])
        return Result(OK, f"{number} native extensions load, built for torch {running}")
    wanted = "the RBLN backend, with native extensions that load into this torch"
    fix = "install the lmcache +rbln wheel for this torch, or build LMCache again "
    return Result(FAIL, found, wanted, f"{fix}where this torch is installed")
