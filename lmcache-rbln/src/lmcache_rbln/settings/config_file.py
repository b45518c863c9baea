# SPDX-License-Identifier: Apache-2.0
"""LMCache's configuration file."""

# Future
from __future__ import annotations

# Standard
from pathlib import Path
from typing import Any

# Local
from .problem import Problem

FILE = "LMCACHE_CONFIG_FILE"
_LARGEST_FILE = 1 << 20


def read_file(file: str) -> tuple[dict[Any, Any], Problem | None]:
    """Read a configuration file.

    Args:
        file: Its name.

    Returns:
        Its entries, and what is wrong with it as a whole.
    """
    # Third Party
    import yaml

    def problem(found: str) -> tuple[dict[Any, Any], Problem]:
        return {}, Problem(
            FILE,
            f"{FILE}={file}: {found}",
            "a YAML file with one mapping of settings",
            f"correct the file, or unset {FILE}",
        )

    try:
        path = Path(file)
        if path.exists() and not path.is_file():
            # LMCache reads it once in each process, which a pipe can't give.
            return problem("not a file")
        if path.stat().st_size > _LARGEST_FILE:
            return problem(f"{path.stat().st_size} bytes")
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        return problem(error.strerror or type(error).__name__)
    except yaml.YAMLError as error:
        # What it says quotes the file, which may hold secrets.
        mark = getattr(error, "problem_mark", None)
        at = f" at line {mark.line + 1} column {mark.column + 1}" if mark else ""
        return problem(f"it can't be parsed as YAML{at}")
    except (ValueError, RecursionError) as error:
        return problem(f"it can't be parsed as YAML ({type(error).__name__})")
    if entries is None:
        return {}, None
    if not isinstance(entries, dict):
        return problem(f"it holds a {type(entries).__name__}")
    return entries, None
