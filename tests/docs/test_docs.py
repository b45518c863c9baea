# SPDX-License-Identifier: Apache-2.0
"""What the documents say exists, and some test uses it."""

# Standard
from functools import cache
from importlib import util
from pathlib import Path
import re
import shlex
import subprocess
import sys

# Third Party
import pytest

# First Party
from tests.e2e.messages import LOGGED
from tests.support.documents import EXTENSION_PAGE, RDS_PAGE, USER_PAGE, messages

ROOT = Path(__file__).resolve().parents[2]
EXTENSION = ROOT / "lmcache-rbln"
DOCUMENTS = [
    ROOT / "README.md",
    USER_PAGE,
    *sorted((ROOT / "docs/design").rglob("*.md")),
    *sorted((ROOT / "sim").glob("*.md")),
    EXTENSION / "README.md",
    *sorted((EXTENSION / "docs").glob("*.md")),
    ROOT / "benchmarks/README.md",
]
TESTS = [
    ROOT / "tests",
    ROOT / "sim/tests",
    ROOT / "lmcache-rbln/tests",
    ROOT / ".buildkite",
]
_VARIABLE = re.compile(
    r"\b(?:BUILD_WITH|LMCACHE|RBLN|TORCH_DEVICE|VLLM)_[A-Z0-9_]*[A-Z0-9]\b"
)
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")


def name(document: Path) -> str:
    return str(document.relative_to(ROOT))


@cache
def text_of(*folders: Path) -> str:
    """Return all Python, C++ and shell sources below the folders."""
    parts = []
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            known = path.suffix in {".py", ".cc", ".cpp", ".h", ".sh", ".yml", ".toml"}
            if known and path != Path(__file__) and path.is_file():
                parts.append(path.read_text(encoding="utf-8", errors="replace"))
    return "\n".join(parts)


@cache
def sources() -> str:
    """Return the sources that may read a setting."""
    packages = []
    for package in ("torch_rbln", "vllm_rbln"):
        spec = util.find_spec(package)
        packages += [Path(p) for p in (spec and spec.submodule_search_locations) or []]
    return text_of(
        ROOT / "build/editable/lmcache",
        ROOT / "lmcache",
        ROOT / "setup_extensions",
        ROOT / "dev",
        ROOT / "sim/src",
        ROOT / "sim/csrc",
        EXTENSION / "src",
        *packages,
    ) + (ROOT / "setup.py").read_text(encoding="utf-8")


@cache
def help_of(*command: str) -> set[str]:
    """Return the flags in a command's help."""
    run = subprocess.run(
        [str(Path(sys.executable).parent / command[0]), *command[1:]],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    return set(_FLAG.findall(run.stdout))


def commands(document: Path, start: str) -> list[str]:
    """Return the shell commands of a document that begin with ``start``."""
    text = document.read_text(encoding="utf-8").replace("\\\n", " ")
    quoted = re.sub(r"'\{.*?\}'", "JSON", text, flags=re.DOTALL)
    return [
        line.strip() for line in quoted.splitlines() if line.strip().startswith(start)
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_variable_is_read_and_tested(document: Path) -> None:
    for variable in set(_VARIABLE.findall(document.read_text(encoding="utf-8"))):
        # LMCache names its variables after the fields of its configuration.
        field = f'"{variable.removeprefix("LMCACHE_").lower()}": {{'
        read = variable in sources() or field in sources()
        assert read, f"nothing reads {variable}"
        assert variable in text_of(*TESTS), f"no test uses {variable}"


@pytest.mark.npu
@pytest.mark.parametrize(
    ("start", "help_command"),
    [
        ("lmcache server", ("lmcache", "server", "--help")),
        ("vllm serve", ("vllm", "serve", "--help=all")),
    ],
)
def test_every_flag_of_a_command_exists_and_is_tested(
    start: str, help_command: tuple[str, ...]
) -> None:
    found = [c for document in DOCUMENTS for c in commands(document, start)]
    assert found
    used = text_of(*TESTS, ROOT / "examples")
    for command in found:
        for flag in _FLAG.findall(command):
            assert flag in help_of(*help_command), f"{start} has no {flag}"
            assert f'"{flag}' in used, f"no test uses {flag}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_flag_in_prose_is_used_by_a_test(document: Path) -> None:
    used = text_of(*TESTS, ROOT / "examples") + (ROOT / "conftest.py").read_text()
    used += (ROOT / "Makefile").read_text(encoding="utf-8")
    text = document.read_text(encoding="utf-8")
    ours = re.sub(r"(?m)^(?:systemctl|journalctl) .*$", "", text)
    for flag in set(_FLAG.findall(ours)):
        assert flag in used, f"no test uses {flag}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_metric_is_tested(document: Path) -> None:
    for metric in re.findall(r"\b\w+:\w+_total\b", document.read_text("utf-8")):
        assert metric in text_of(*TESTS), f"no test reads {metric}"


def test_every_test_in_the_table_of_what_works_together_exists() -> None:
    text = USER_PAGE.read_text(encoding="utf-8")
    named = re.findall(r"``([\w/]+\.py)::(\w+)``", text)
    assert len(set(named)) > 8
    for file, test in named:
        found = [path for folder in TESTS for path in folder.rglob(file)]
        assert found, f"no test file {file}"
        assert any(f"def {test}(" in path.read_text("utf-8") for path in found), test


@cache
def make_targets(folder: Path) -> set[str]:
    """Return the targets that make knows in a folder, generated ones included."""
    database = subprocess.run(
        ["make", "-npq", "-C", str(folder)], capture_output=True, text=True, timeout=600
    )
    return set(re.findall(r"(?m)^([a-z][a-z-]*):", database.stdout))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_make_target_exists(document: Path) -> None:
    known = make_targets(ROOT) | make_targets(ROOT / "sim")
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"(?m)(?:`|^ *)make (?:-C sim )?([a-z][a-z-]*)", text):
        assert target in known, f"no target {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_link_leads_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (document.parent / target).exists(), target
    for target in re.findall(r"``((?:docs|dev|tests|\.buildkite)/[^`]+)``", text):
        assert (ROOT / target).exists(), target


@pytest.mark.npu
def test_direct_storage_is_asked_as_documented() -> None:
    [line] = [c for c in commands(RDS_PAGE, "python -c") if "rebel" in c]
    [_, *arguments] = shlex.split(line)
    run = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"RDS available: True\nRDS devices: [1-9]", run.stdout)


@pytest.mark.parametrize("page", [USER_PAGE, EXTENSION_PAGE, RDS_PAGE], ids=name)
def test_every_message_to_look_up_is_in_the_log_of_a_start(page: Path) -> None:
    logged = {message for start in LOGGED.values() for message in start}
    quoted = messages(page)
    assert len(quoted) > 6
    assert not [message for message in quoted if message not in logged]


def test_a_test_makes_each_of_those_starts() -> None:
    folder = ROOT / "tests/e2e"
    paths = (p for p in folder.rglob("test_*.py"))
    tests = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    assert not [start for start in LOGGED if f'"{start}"' not in tests]
