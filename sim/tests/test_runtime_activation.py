# SPDX-License-Identifier: Apache-2.0
"""Opting in to the simulator, and being refused."""

# Standard
from pathlib import Path
import os
import signal
import subprocess
import sys

# Third Party
import pytest

# First Party
from rbln_sim.pytest_plugin import RunPython
from rbln_sim import activation, cli, symbols
import rbln_sim

pytestmark = pytest.mark.sim


def _pretend_real_runtime(folder: Path) -> None:
    metadata = folder / "rebel_compiler-0.12.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(
        "Metadata-Version: 2.1\nName: rebel-compiler\nVersion: 0.12.0\n"
    )


def test_environment_leads_to_library_and_package() -> None:
    made = rbln_sim.environment(
        {"LD_LIBRARY_PATH": "/a:/b", "PYTHONPATH": "", "PATH": "/bin", "X": "1"}
    )
    assert made == {
        "LD_LIBRARY_PATH": f"{activation.library_path().parent}:/a:/b",
        "PYTHONPATH": str(activation.site_folder()),
        "PATH": f"{activation.site_folder()}/bin:/bin",
        "X": "1",
    }
    assert rbln_sim.environment(made) == made
    assert rbln_sim.environment({})["PATH"].endswith(f":{os.defpath}")
    assert (activation.site_folder() / "rebel" / "__init__.py").is_file()


def test_nothing_finds_the_simulator_without_opting_in(rbln_sim_run: RunPython) -> None:
    done = rbln_sim_run(
        """
        import rbln_sim, importlib.util, sys
        assert importlib.util.find_spec("rebel") is None
        assert not [name for name in sys.modules if name.startswith("torch")]
        """,
        LD_LIBRARY_PATH="",
        PYTHONPATH=str(Path(rbln_sim.__file__).parents[1]),
    )
    assert done.returncode == 0, done.stderr


def test_activate_works_inside_the_process(rbln_sim_run: RunPython) -> None:
    done = rbln_sim_run(
        """
        import rbln_sim
        rbln_sim.activate()
        import rebel, torch
        print(torch.rbln.is_available(), torch.rbln.get_device_name(0))
        """,
        LD_LIBRARY_PATH="",
        PYTHONPATH=str(Path(rbln_sim.__file__).parents[1]),
    )
    assert done.stdout == "True RBLN-CR03\n", done.stderr


def test_activate_after_torch_is_refused(rbln_sim_run: RunPython) -> None:
    done = rbln_sim_run(
        "import torch, rbln_sim\nrbln_sim.activate()",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert "RuntimeError: rbln_sim.activate() came too late" in done.stderr


def test_a_wrong_setting_stops_activation_and_changes_nothing(
    rbln_sim_run: RunPython,
) -> None:
    done = rbln_sim_run(
        """
        import os, rbln_sim
        before = dict(os.environ)
        try:
            rbln_sim.activate()
        except RuntimeError as error:
            print(error, os.environ == before)
        """,
        RBLN_SIM_DEVICES="two",
        LD_LIBRARY_PATH="",
    )
    assert done.stdout.startswith("RBLN_SIM_DEVICES='two' is not a whole number"), (
        done.stderr
    )
    assert done.stdout.endswith(" True\n")


@pytest.mark.parametrize("command", ["exec", "doctor"])
def test_a_real_runtime_is_refused(
    command: str, tmp_path: Path, rbln_sim_environment: dict[str, str]
) -> None:
    _pretend_real_runtime(tmp_path)
    environment = rbln_sim_environment | {
        "PYTHONPATH": f"{rbln_sim_environment['PYTHONPATH']}{os.pathsep}{tmp_path}"
    }
    words = ["--", "true"] if command == "exec" else []
    done = subprocess.run(
        [sys.executable, "-m", "rbln_sim.cli", command, *words],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "rebel-compiler 0.12.0 is installed" in done.stderr


def test_exec_runs_the_command(rbln_sim_environment: dict[str, str]) -> None:
    del rbln_sim_environment["LD_LIBRARY_PATH"]
    code = "import sys, torch; torch.rbln.synchronize(); print(sys.argv); sys.exit(7)"
    done = subprocess.run(
        [sys.executable, "-m", "rbln_sim.cli", "exec", "--"]
        + [sys.executable, "-c", code, "--", "-x"],
        env=rbln_sim_environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout == "['-c', '--', '-x']\n"


def test_exec_takes_the_place_of_the_command(
    rbln_sim_environment: dict[str, str],
) -> None:
    """So that signals reach it and its end is told as it is."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rbln_sim.cli", "exec", "--"]
        + ["sh", "-c", "echo $$; exec sleep 600"],
        env=rbln_sim_environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == -signal.SIGTERM
    process.stdout.close()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], 2),
        (["--"], 2),
        (["--", "/no/such/program"], 127),
        (["--", "/"], 126),
    ],
)
def test_exec_says_what_is_wrong(
    words: list[str], code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["exec", *words]) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert "rbln-sim exec: " in err


def test_doctor_fails_on_a_library_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = {"_ZN4rbln9rbln_freeEm", "rbln_abi_current"}
    exported = symbols.exported()
    monkeypatch.setattr(symbols, "exported", lambda: exported - missing)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith(
        "  missing: _ZN4rbln9rbln_freeEm\n"
        "  looked up by torch-rbln, but not exported: rbln_abi_current\n"
        "FAILED\n"
    )


def test_doctor_fails_without_torch_rbln(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(symbols.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["doctor"]) == 1
    assert "torch-rbln is not installed" in capsys.readouterr().err


def test_doctor_is_content(rbln_sim_environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rbln_sim.cli", "doctor"],
        env=rbln_sim_environment | {"RBLN_SIM_SEED": "7"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("OK\n")
    for text in ("RBLN_SIM_SEED=7", "\nknown:", "\nassumed:", "\nunsupported:"):
        assert text in done.stdout
    assert not Path(rbln_sim_environment["RBLN_SIM_STATE_DIR"]).exists()


def test_doctor_fails_on_a_wrong_setting(rbln_sim_environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rbln_sim.cli", "doctor"],
        env=rbln_sim_environment | {"RBLN_SIM_FAULTS": "copy:1:fail"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "RBLN_SIM_FAULTS: cannot read the rule 'copy:1:fail'" in done.stderr
