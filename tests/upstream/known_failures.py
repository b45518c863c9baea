# SPDX-License-Identifier: Apache-2.0
"""Plugin of pytest for LMCache's own tests: what is known to fail, and why.

Tests are named by patterns. What fails must go on failing, so that the list says what
is; only what depends on the machine's load may do both.
"""

# Standard
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
import tomllib

# Third Party
import pytest

RELEASE = metadata.version("lmcache").split("+")[0]
_ALL = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_EVERY, _OWN = _ALL["of every release"], _ALL.get(RELEASE, {})
#: Files that can't be imported over our wheel.
NOT_IMPORTED: list[str] = _EVERY["not_imported"]
#: Reasons by pattern: of what fails, and of what fails under load.
FAILS, FAILS_UNDER_LOAD = (
    _EVERY[kind] | _OWN.get(kind, {}) for kind in ("fails", "fails_under_load")
)
_used = pytest.StashKey[set[str]]()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files that can't be imported over our wheel."""
    path = collection_path.relative_to(config.rootpath).as_posix()
    return True if path in NOT_IMPORTED else None


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Mark what is known to fail."""
    used = config.stash.setdefault(_used, set())
    for listed, strict in ((FAILS, True), (FAILS_UNDER_LOAD, False)):
        for pattern, reason in listed.items():
            mark = pytest.mark.xfail(reason=reason, strict=strict)
            for item in items:
                if fnmatchcase(item.nodeid, pattern):
                    used.add(pattern)
                    item.add_marker(mark)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say which lines of the list name nothing that was collected."""
    for pattern in FAILS.keys() - config.stash.get(_used, set()):
        terminalreporter.write_line(f"listed, and not among these tests: {pattern}")
