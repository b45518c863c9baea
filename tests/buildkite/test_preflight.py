# SPDX-License-Identifier: Apache-2.0
"""The preflight's judgement, and the check of test reports."""

# Standard
from importlib import util
from pathlib import Path
from types import ModuleType
import sys

# Third Party
import pytest

PIPELINE = Path(__file__).resolve().parents[2] / ".buildkite" / "k3_tests" / "rbln"


def load(name: str) -> ModuleType:
    """Import a script of the pipeline, which is no package, by its path."""
    spec = util.spec_from_file_location(f"rbln_{name}", PIPELINE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


preflight = load("preflight")
check_results = load("check_results")

TORCH = '{"torch": "2.13.0+cpu", "npus": 2}\n'
BACKEND = '{"backend": "rbln"}\n'
NAME = '{"name": "RBLN-CA25"}\n'


@pytest.mark.parametrize(
    ("output", "errors", "failed", "reason"),
    [
        (TORCH + BACKEND + NAME, "", None, ""),
        ("", "OSError: librbln.so\n", "NPUs visible", "OSError: librbln.so"),
        ('{"torch": "2", "npus": 0}\n', "", "NPUs visible", "0"),
        (
            TORCH,
            "Traceback\nImportError: lmcache_native\n",
            "LMCache backend",
            "ImportError: lmcache_native",
        ),
        (TORCH + '{"backend": "cpu"}\n' + NAME, "", "LMCache backend", "cpu"),
        (
            TORCH + BACKEND,
            "[rbln-sim] NPU 0 is held by pid 7\nRuntimeError: rc=1\n",
            "NPU opens",
            "[rbln-sim] NPU 0 is held by pid 7; RuntimeError: rc=1",
        ),
    ],
)
def test_probe_is_judged(
    output: str, errors: str, failed: str | None, reason: str
) -> None:
    checks = preflight.judge_probe("log line\n" + output, errors)
    bad = [check for check in checks if not check.ok]
    assert [check.name for check in bad] == ([failed] if failed else [])
    for check in bad:
        assert check.found == reason
        assert check.fix


def test_verdict_names_the_fix_and_the_runtime() -> None:
    good = preflight.Check("Python", True, "3.11.7")
    bad = preflight.Check("torch", False, "2.12.0", "reinstall torch")
    text = preflight.format_verdict("NPU (rebel-compiler 0.12.0)", [good, bad])
    assert "FAIL  torch   2.12.0\n" in text
    assert "-> reinstall torch" in text
    assert text.endswith("verdict: NOT READY, 1 of 2 checks failed")
    assert preflight.format_verdict("NPU (x)", [good]).endswith("READY on NPU (x)")
    simulated = preflight.format_verdict("SIMULATED NPU (x)", [good])
    assert simulated.endswith("READY on SIMULATED NPU (x); this validates no hardware")


def test_versions_and_torch_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {
        "lmcache": "0.5.6",
        "torch-rbln": "0.12.3",
        "vllm-rbln": "0.12.0",
        "torch": "2.12.0+cpu",
    }
    monkeypatch.setattr(preflight, "_version", installed.get)
    monkeypatch.setattr(
        preflight, "_requirements", lambda name: ["scipy", "torch==2.13.0+cpu; x"]
    )
    found = {check.name: check for check in preflight.check_versions()}
    assert not found["lmcache"].ok, "upstream's own wheel has no +rbln"
    assert found["torch-rbln"].ok and found["vllm-rbln"].ok
    assert not found["vllm"].ok and found["vllm"].found == "not installed"
    torch = preflight.check_torch()
    assert not torch.ok and "2.13.0+cpu" in torch.fix


def test_full_shared_memory_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert preflight.check_shared_memory(tmp_path).ok
    monkeypatch.setattr(preflight, "SHM_NEEDED", 1 << 62)
    assert not preflight.check_shared_memory(tmp_path).ok


SKIPPED = '<skipped message="no NPU and no simulator: none installed"/>'


@pytest.mark.parametrize(
    ("cases", "problem"),
    [
        ('<testcase classname="a" name="b"/>', None),
        ("", "none of 0 tests ran"),
        (
            '<testcase name="a"/><testcase name="b"><skipped message="slow"/>'
            "</testcase>",
            None,
        ),
        (f'<testcase name="a"/><testcase name="b">{SKIPPED}</testcase>', "no NPU"),
        ('<testcase name="a"><failure/></testcase>', "::a failed"),
        ('<testcase name="a"><error/></testcase>', "::a failed"),
    ],
)
def test_report_that_validates_nothing_is_refused(
    tmp_path: Path, cases: str, problem: str | None
) -> None:
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    found = check_results.find_problems(report)
    assert (found == []) if problem is None else problem in found[0]
