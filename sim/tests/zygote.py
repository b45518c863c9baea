# SPDX-License-Identifier: Apache-2.0
"""Runs Python code in forks of a process that has imported torch.

Starting Python with torch takes seconds of CPU; a fork of this process, which never
uses an NPU, takes none. Only for code that may find torch imported (the environment of
a run is set after that) and that need not end as a program does, which would take a
second more.

It reads a request as a line of JSON (``code``, ``environment``, and the files for
``stdout`` and ``stderr``) and answers with the return code, until its input ends.
"""

# Standard
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import traceback

Run = Callable[[str, dict[str, str]], subprocess.CompletedProcess[str]]

REPO = Path(__file__).resolve().parents[2]
_TIME_LIMIT_S = 300


@contextmanager
def zygote(
    environment: dict[str, str], folder: Path, module: str = "torch"
) -> Iterator[Run]:
    """Start the process; yields a function that runs code in a fork of it.

    Args:
        environment: Of the process.
        folder: For the output of the runs.
        module: What it imports before.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, module],
        cwd=REPO,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    numbers = itertools.count()

    requests, answers = process.stdin, process.stdout

    def run(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        number = next(numbers)
        out, err = folder / f"{number}.out", folder / f"{number}.err"
        request = {
            "code": textwrap.dedent(code),
            "environment": environment,
            "stdout": str(out),
            "stderr": str(err),
        }
        requests.write(json.dumps(request) + "\n")
        requests.flush()
        returncode = int(answers.readline())
        return subprocess.CompletedProcess(
            ["python", "-c", code], returncode, out.read_text(), err.read_text()
        )

    try:
        yield run
    finally:
        requests.close()
        process.wait()


def _serve() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(json.loads(line))
        status = os.waitpid(child, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(request: dict[str, Any]) -> NoReturn:
    signal.alarm(_TIME_LIMIT_S)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    # The fork of the test's process must not read the next request.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 1
    try:
        exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    importlib.import_module(sys.argv[1])
    _serve()
