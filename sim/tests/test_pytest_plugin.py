# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin, used by tests that pytester runs."""

# Standard
from importlib import metadata
from pathlib import Path

# Third Party
import pytest

# First Party
from rbln_sim.pytest_plugin import Open, read_opens

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.sim


@pytest.fixture
def project(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> pytest.Pytester:
    """A project whose pytest starts in an environment without the simulator."""
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    return pytester


def run(
    project: pytest.Pytester, code: str, *arguments: str, plugin: bool = True
) -> pytest.RunResult:
    """Run test code in a process of its own."""
    project.makepyfile(code)
    load = ["-p", "rbln_sim.pytest_plugin"] if plugin else []
    return project.runpytest_subprocess("--strict-markers", *load, *arguments)


def test_no_entry_point_loads_it(project: pytest.Pytester) -> None:
    names = [entry.value for entry in metadata.entry_points(group="pytest11")]
    assert not [name for name in names if "rbln_sim" in name]
    code = "def test(rbln_sim_environment): pass"
    result = run(project, code, plugin=False)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*fixture 'rbln_sim_environment' not found"])


def test_loading_it_activates_nothing(project: pytest.Pytester) -> None:
    code = """
        import importlib.util, os, sys

        def test():
            assert importlib.util.find_spec("rebel") is None
            assert "rbln" not in os.environ.get("LD_LIBRARY_PATH", "")
            assert not {"torch", "torch_rbln"} & set(sys.modules)

        def test_its_environment_is_for_children(rbln_sim_environment):
            test()
            assert "RBLN_SIM_STATE_DIR" in rbln_sim_environment
            folder = os.environ.get("RBLN_SIM_STATE_DIR")
            assert rbln_sim_environment["RBLN_SIM_STATE_DIR"] != folder
    """
    run(project, code).assert_outcomes(passed=2)


def test_each_test_has_its_own_machine(project: pytest.Pytester) -> None:
    code = """
        import os, subprocess, sys, time
        import pytest

        USE = "import torch; torch.rbln.synchronize(); print(os.getpid())"

        @pytest.fixture(scope="module", autouse=True)
        def holder(tmp_path_factory):
            from rbln_sim.pytest_plugin import machine_environment
            process = subprocess.Popen(
                [sys.executable, "-c",
                 "import sys, torch; torch.rbln.synchronize(); print(flush=True);"
                 "sys.stdin.read()"],
                env=machine_environment(tmp_path_factory.mktemp("other")),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
            assert process.stdout.readline()
            yield process.pid
            process.communicate()

        @pytest.mark.rbln_sim(devices=2)
        def test_opens(rbln_sim_run, rbln_sim_opens):
            assert rbln_sim_opens() == []
            before = time.time()
            done = rbln_sim_run("import os; " + USE)
            assert done.returncode == 0, done.stderr
            first, second = rbln_sim_opens()
            assert (first.npu, second.npu) == (0, 1)
            assert first.pid == second.pid == int(done.stdout)
            assert before <= first.time <= second.time <= time.time()
            assert "torch.rbln.synchronize()" in first.argv

        def test_the_next_one_starts_anew(rbln_sim_run, rbln_sim_opens):
            assert rbln_sim_opens() == []
            done = rbln_sim_run("import os; " + USE, RBLN_SIM_DEVICES="1")
            assert done.returncode == 0, done.stderr
            assert [entry.npu for entry in rbln_sim_opens()] == [0]
    """
    run(project, code).assert_outcomes(passed=2)


def test_settings_come_from_the_closest_marker_and_from_nowhere_else(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RBLN_SIM_MEMORY_GIB", "3")
    monkeypatch.setenv("RBLN_VISIBLE_DEVICES", "5")
    code = """
        import pytest

        def settings(environment):
            names = ("STATE_DIR", "OPEN_LOG")
            return {
                name.removeprefix("RBLN_SIM_"): value
                for name, value in environment.items()
                if name.startswith("RBLN_") and not name.endswith(names)
            }

        @pytest.mark.rbln_sim(devices=3, seed=4)
        class TestMarked:
            @pytest.mark.rbln_sim(devices=2, deferred="latest")
            def test_both(self, rbln_sim_environment):
                wanted = {"DEVICES": "2", "DEFERRED": "latest", "SEED": "4"}
                assert settings(rbln_sim_environment) == wanted

            def test_class(self, rbln_sim_environment):
                wanted = {"DEVICES": "3", "SEED": "4"}
                assert settings(rbln_sim_environment) == wanted

        def test_none(rbln_sim_environment):
            assert settings(rbln_sim_environment) == {}
    """
    run(project, code).assert_outcomes(passed=3)


def test_a_wrong_setting_is_named(project: pytest.Pytester) -> None:
    code = """
        import pytest

        @pytest.mark.rbln_sim(device=2)
        def test(rbln_sim_environment): pass
    """
    result = run(project, code)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*ValueError: 'device' is no setting of rbln-sim; known: *devices*"]
    )


def test_the_log_of_opens_may_hold_any_command_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    entry = b'{"pid": 1, "npu": 0, "time": 2.5, "argv": "a \xff\xe2\x80\xa8b"}\n'
    log.write_bytes(entry * 2)
    assert read_opens(tmp_path / "none") == []
    first, second = read_opens(log)
    assert first == second == Open(1, 0, 2.5, "a \ufffd\u2028b")
