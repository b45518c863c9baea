# SPDX-License-Identifier: Apache-2.0
"""The Makefile's targets."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Parts of ``make test``, which nobody needs to know.
PARTS = {"test-serving", "test-others", "test-native"}


def test_help_lists_every_target() -> None:
    text = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    targets = set(phony[1].split()) - PARTS - {"help"}
    assert targets == set(re.findall(r"make ([\w-]+)", text))
