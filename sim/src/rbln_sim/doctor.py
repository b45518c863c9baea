# SPDX-License-Identifier: Apache-2.0
"""``rbln-sim doctor``: what is simulated, and whether it fits what is installed."""

# Standard
import os
import sys
from importlib.metadata import PackageNotFoundError, version

# First Party
from rbln_sim import symbols
from rbln_sim.activation import check_settings, library_path, site_folder

_DISTRIBUTIONS = ("rbln-sim", "torch", "torch-rbln", "vllm-rbln")


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def symbol_problems(exported: frozenset[str], needed: frozenset[str]) -> list[str]:
    """Compare what the library exports with what torch-rbln needs.

    Args:
        exported: Symbols of the simulated library.
        needed: Symbols that torch-rbln needs from it.

    Returns:
        One line per symbol that is missing, that nobody needs, or that the table of
        behaviours does not cover.
    """
    offered = {
        name for name in exported if not name.startswith(symbols.CONTROL_PREFIX)
    } - symbols.LOOKED_UP
    problems = [f"missing: {name}" for name in sorted(needed - offered)]
    problems += [f"not needed: {name}" for name in sorted(offered - needed)]
    problems += [
        f"not in the table of behaviours: {name}"
        for name in sorted(offered | symbols.LOOKED_UP)
        if symbols.behaviour_of(name) is None
    ]
    problems += [
        f"looked up by torch-rbln, but not exported: {name}"
        for name in sorted(symbols.LOOKED_UP - exported)
    ]
    return problems


def diagnose() -> int:
    """Print what is simulated and check it.

    Returns:
        0 if the simulator fits the installed torch-rbln and its settings are right,
        else 1.

    Raises:
        RuntimeError: the library was not built, a setting is wrong, a real
            ``rebel-compiler`` is installed, or torch-rbln cannot be loaded.
    """
    for name in _DISTRIBUTIONS:
        print(f"{name:12} {_installed(name)}")
    print(f"{'python':12} {sys.version.split()[0]}")
    print(f"{'library':12} {library_path()}")
    print(f"{'rebel':12} {site_folder() / 'rebel'}")
    for name in sorted(os.environ):
        if name.startswith("RBLN_"):
            print(f"{'setting':12} {name}={os.environ[name]}")
    check_settings()
    for status in (symbols.KNOWN, symbols.ASSUMED, symbols.UNSUPPORTED):
        print(f"\n{status}:")
        for behaviour in symbols.BEHAVIOURS:
            if behaviour.status == status:
                print(f"  {', '.join(behaviour.names)}\n      {behaviour.note}")
    exported, needed = symbols.exported(), symbols.needed()
    problems = symbol_problems(exported, needed)
    if not (site_folder() / "rebel" / "__init__.py").is_file():
        problems.append(f"the simulated rebel package is missing in {site_folder()}")
    print(f"\nsymbols: {len(needed)} needed by torch-rbln, {len(exported)} exported")
    for problem in problems:
        print(f"  {problem}")
    print("FAILED" if problems else "OK")
    return 1 if problems else 0
