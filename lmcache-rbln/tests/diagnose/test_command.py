# SPDX-License-Identifier: Apache-2.0
"""``python -m lmcache_rbln.diagnose`` as a user runs it, mostly in broken places.

Fake packages stand in for broken ones: they come first on ``PYTHONPATH``, so these runs
import neither torch nor LMCache and are quick.
"""

# Standard
from pathlib import Path
from typing import Any
import json
import os
import subprocess
import sys

# Third Party
import pytest

# First Party
from lmcache_rbln.diagnose.packages import STACK

CHECKS = [
    *STACK,
    "LMCache build",
    "RBLN runtime",
    "NPU",
    "hash seed",
    "settings",
    "connector",
    "chunk and block",
    "server",
    "RDS",
]
SETTINGS = ("LMCACHE_", "RBLN_", "TORCH_", "PYTHONHASHSEED", "PYTHONPATH", "LD_LIBRARY")


class Diagnose:
    """Runs the command with fake packages before the installed ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.code = 0

    def package(self, name: str, code: str) -> None:
        folder = self.folder / name
        folder.mkdir()
        (folder / "__init__.py").write_text(code)

    def distribution(self, name: str, version: str, *requires: str) -> None:
        folder = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {wish}" for wish in requires]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(SETTINGS)
        }
        environment |= {"PYTHONPATH": str(self.folder), "COLUMNS": "80"} | variables
        done = subprocess.run(
            [sys.executable, "-m", "lmcache_rbln.diagnose", *words],
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert "Traceback" not in done.stdout + done.stderr
        return done

    def checks(self, *words: str, **variables: str) -> dict[str, dict[str, Any]]:
        done = self.run("--json", *words, **variables)
        report = json.loads(done.stdout)
        self.code = done.returncode
        assert report["ok"] is (done.returncode == 0)
        checks = {check["name"]: check for check in report["checks"]}
        assert list(checks) == CHECKS
        for check in checks.values():
            assert check["found"]
            if check["status"] == "fail":
                assert check["wanted"]
                assert check["fix"]
        return checks


@pytest.fixture
def diagnose(tmp_path: Path) -> Diagnose:
    return Diagnose(tmp_path)


@pytest.fixture
def without_torch(diagnose: Diagnose) -> Diagnose:
    diagnose.package("torch", "raise ImportError('libtorch_cpu.so: no such file')")
    diagnose.package("lmcache", "raise RuntimeError('LMCache is broken')")
    return diagnose


def test_a_torch_that_does_not_import(without_torch: Diagnose) -> None:
    checks = without_torch.checks()
    assert without_torch.code == 1
    assert "libtorch_cpu.so: no such file" in checks["LMCache build"]["found"]
    assert checks["RBLN runtime"]["status"] == "fail"
    assert checks["NPU"]["status"] == "skip"
    assert "LMCache is broken" in checks["settings"]["found"]


def test_packages_of_other_versions(without_torch: Diagnose) -> None:
    without_torch.distribution("torch", "2.12.0")
    without_torch.distribution("lmcache", "0.5.6")
    without_torch.distribution("vllm", "0.31.0")
    checks = without_torch.checks()
    assert "torch==2.13.0+cpu (torch-rbln 0.12.0)" in checks["torch"]["wanted"]
    assert "vllm==0.30.0+cpu (vllm-rbln 0.12.0)" in checks["vllm"]["wanted"]
    assert checks["lmcache"]["found"] == "0.5.6: not an RBLN build"
    assert checks["lmcache-rbln"]["status"] == "ok"


def test_a_runtime_of_another_abi(diagnose: Diagnose) -> None:
    source = diagnose.folder / "abi.c"
    source.write_text(
        "unsigned rbln_abi_min_supported(void) { return 907; }\n"
        "unsigned rbln_abi_current(void) { return 908; }\n"
    )
    library = diagnose.folder / "librbln.so"
    subprocess.run(["cc", "-shared", "-o", library, source], check=True)
    check = diagnose.checks("--timeout", "300", LD_LIBRARY_PATH=str(diagnose.folder))[
        "RBLN runtime"
    ]
    assert check["status"] == "fail"
    assert "no longer accepts consumers below ABI 907" in check["found"]
    assert "librbln.so of its ABI" in check["wanted"]


def test_malformed_everything(without_torch: Diagnose) -> None:
    checks = without_torch.checks(
        "--kv-transfer-config",
        "{",
        "--server",
        "nowhere",
        "--block-size",
        "1",
        PYTHONHASHSEED="random",
        RBLN_VISIBLE_DEVICES="zero",
        LMCACHE_CHUNK_SIZE="x",
        LMCACHE_CONFIG_FILE="/no/such/file",
        TORCH_DEVICE_BACKEND_AUTOLOAD="maybe",
    )
    assert without_torch.code == 1
    for name in ("connector", "server", "RBLN runtime"):
        assert checks[name]["status"] == "fail", checks[name]
    assert "no port" in checks["server"]["found"]


def test_what_hangs_is_given_up(diagnose: Diagnose) -> None:
    diagnose.package("torch", "import time\ntime.sleep(600)")
    checks = diagnose.checks("--timeout", "4")
    assert "no answer in 4 s" in checks["LMCache build"]["found"]
    assert checks["RBLN runtime"]["status"] == "fail"
    assert checks["hash seed"]["status"] == "warn"


def test_what_crashes_is_told(diagnose: Diagnose) -> None:
    diagnose.package("torch", "import os\nos.kill(os.getpid(), 11)")
    checks = diagnose.checks()
    assert "signal 11 (SIGSEGV)" in checks["LMCache build"]["found"]
    assert checks["settings"]["status"] == "fail"


def test_torch_rbln_without_its_runtime(diagnose: Diagnose) -> None:
    """There a bare ``import torch`` fails; everything else is still told."""
    checks = diagnose.checks(
        "--timeout", "300", PYTHONHASHSEED="0", LMCACHE_LOCAL_CPU="yes"
    )
    assert diagnose.code == 1
    assert checks["rebel-compiler"]["status"] == "fail"
    assert "Could not find librbln.so" in checks["RBLN runtime"]["found"]
    assert "rebel-compiler" in checks["RBLN runtime"]["fix"]
    assert checks["NPU"]["status"] == "skip"
    assert checks["LMCache build"]["status"] == "ok"
    assert "LMCACHE_LOCAL_CPU" in checks["settings"]["found"]
    assert checks["hash seed"]["status"] == "ok"


@pytest.mark.parametrize(
    "words", [["--help"], ["--block-size", "x"], ["--timeout", "0"], ["--bad"]]
)
def test_the_command_line(words: list[str], diagnose: Diagnose) -> None:
    done = diagnose.run(*words)
    assert done.returncode == (0 if words == ["--help"] else 2)
    text = done.stdout + done.stderr
    for flag in ("--json", "--block-size", "--kv-transfer-config", "--server"):
        assert flag in text
    assert "--timeout" in text


def test_a_check_that_breaks_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # First Party
    from lmcache_rbln.diagnose import __main__ as command
    from lmcache_rbln.diagnose.probe import Facts

    def broken(*_: object) -> None:
        raise KeyError("oh")

    monkeypatch.setattr(command, "run_probe", lambda *_: Facts(problem="not run"))
    monkeypatch.setattr(command.settings, "check_hash_seed", broken)
    assert command.main([]) == 1
    assert "the check broke: KeyError: 'oh'" in capsys.readouterr().out
