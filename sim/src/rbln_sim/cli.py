# SPDX-License-Identifier: Apache-2.0
"""The command ``rbln-sim``."""

# Standard
import argparse
import os
import sys

# First Party
from rbln_sim.activation import check_settings, environment
from rbln_sim.doctor import diagnose


def _execute(command: list[str]) -> int:
    if not command:
        print(
            "rbln-sim exec: no command given; usage: rbln-sim exec -- COMMAND",
            file=sys.stderr,
        )
        return 2
    child_environment = environment()
    check_settings()
    try:
        os.execvpe(command[0], command, child_environment)
    except OSError as error:
        print(
            f"rbln-sim exec: cannot run {command[0]}: {error.strerror}", file=sys.stderr
        )
        return 127 if isinstance(error, FileNotFoundError) else 126


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Arguments after the program's name; this process's by default.

    Returns:
        The exit code: 0, 1 if a check failed, 2 for wrong use, 126 or 127 if the
        command cannot be run or was not found. A command that runs takes the place of
        this process, so its signals and its exit code are its own.
    """
    parser = argparse.ArgumentParser(
        prog="rbln-sim", description="A simulated NPU for torch-rbln and vllm-rbln."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    execute = commands.add_parser(
        "exec", help="run a command that uses the simulated NPU"
    )
    execute.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    commands.add_parser(
        "doctor", help="say what is simulated and check that it fits torch-rbln"
    )
    parsed = parser.parse_args(arguments)
    try:
        if parsed.command == "doctor":
            return diagnose()
        words = parsed.words
        return _execute(words[1:] if words[:1] == ["--"] else words)
    except RuntimeError as error:
        print(f"rbln-sim: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
