# SPDX-License-Identifier: Apache-2.0
"""What the documents tell users to run, and the messages they tell them to look up."""

# Standard
from dataclasses import dataclass
from pathlib import Path
import re
import shlex

ROOT = Path(__file__).resolve().parents[2]
USER_PAGE = ROOT / "docs/source/mp/rbln.rst"
EXTENSION_PAGE = ROOT / "lmcache-rbln/README.md"
RDS_PAGE = ROOT / "lmcache-rbln/docs/rds.md"

_FENCED = re.compile(r"```(?:bash)?\n(.*?)```", re.DOTALL)
_INDENTED = re.compile(r"\.\. code-block:: bash\n\n((?:(?:   .*)?\n)+)")
_TERM = re.compile(r"(?m)^``(.+?)``$")
_ROW = re.compile(r"(?m)^\| `(.+?)` \|")


@dataclass(frozen=True)
class Launch:
    """A documented launch.

    Attributes:
        env: What it exports.
        commands: Its commands in order, as a shell would split them.
    """

    env: dict[str, str]
    commands: list[list[str]]

    def command(self, *program: str) -> list[str]:
        """The arguments of the only command that begins like this."""
        [found] = [c for c in self.commands if c[: len(program)] == list(program)]
        return found[len(program) :]


def launch(document: Path) -> Launch:
    """Read the launch of ``vllm serve`` in a document.

    Args:
        document: A page with one code block that has it.
    """
    text = document.read_text(encoding="utf-8")
    blocks = (_FENCED if document.suffix == ".md" else _INDENTED).findall(text)
    [block] = [block for block in blocks if "vllm serve" in block]
    env: dict[str, str] = {}
    commands: list[list[str]] = []
    for line in _logical_lines(block):
        words = shlex.split(line)
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            env[name] = value
        else:
            commands.append(words)
    return Launch(env, commands)


def messages(document: Path) -> list[str]:
    """The messages in a document's section Troubleshooting, as they are quoted."""
    text = document.read_text(encoding="utf-8")
    section = re.split(r"(?m)^(?:## )?Troubleshooting\n", text, maxsplit=1)[1]
    if document.suffix == ".md":
        return _ROW.findall(section.split("\n## ", 1)[0])
    return _TERM.findall(section)


def _logical_lines(block: str) -> list[str]:
    """Lines of a shell script, those put together that belong together."""
    lines: list[str] = []
    pending = ""
    for line in block.splitlines():
        pending += line[:-1] + " " if line.endswith("\\") else line
        if line.endswith("\\"):
            continue
        # Within quotes a line break belongs to the word.
        if pending.count("'") % 2:
            pending += "\n"
            continue
        if pending.strip():
            lines.append(pending.strip())
        pending = ""
    return lines
