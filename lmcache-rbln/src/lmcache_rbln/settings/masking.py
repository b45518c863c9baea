# SPDX-License-Identifier: Apache-2.0
"""Values of settings as they may be printed: masked, unless known to be harmless."""

# Future
from __future__ import annotations

# Standard
from collections.abc import Iterable
from typing import Any
import re

MASK = "***"
_LONGEST = 64
# "5GB", "abc", "1e3", "-1", "yes": what people write for numbers and switches. Longer
# words and words with digits in them may be anything.
_KINDS = {
    "number": re.compile(r"[-+]?[\d.,_]{0,24}(?:[eE][-+]?\d{1,3})?\s?[A-Za-z%]{0,8}"),
    "name": re.compile(r"[A-Za-z_][\w.\-]{0,120}"),
}
# A password may hold any of the characters that divide a URL, so what has more than
# scheme, user, host and port is not shown.
_URL = re.compile(
    r"([A-Za-z][\w+.\-]{0,20}://)([^?#\s]*@)?"
    r"((?:[\w.\-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?)/?"
)


def show(value: Any, words: Iterable[str] = (), kind: str = "") -> str:
    """Return a value as it may be printed.

    Args:
        value: The value.
        words: Words that are no secret.
        kind: What the value should be, where that tells what it can't be: ``number``
            (also for switches) or ``name``.
    """
    if value is None or isinstance(value, bool | int | float):
        return repr(value)[:_LONGEST]
    if isinstance(value, list):
        return f"[{', '.join(show(entry, words, kind) for entry in value[:8])}]"
    if not isinstance(value, str):
        return MASK
    text = value.strip()
    if not text or text in words or (kind and _KINDS[kind].fullmatch(text)):
        return repr(value[: 2 * _LONGEST])
    url = _URL.fullmatch(text)
    return f"{url[1]}{MASK + '@' if url[2] else ''}{url[3]}" if url else MASK


def show_name(name: object) -> str:
    """Return a setting's name as it may be printed; what is no name may be a value."""
    text = str(name)
    return text if _KINDS["name"].fullmatch(text) else show(name)


def without_users(text: str) -> str:
    """Return a message of others without the users and passwords of URLs."""
    return re.sub(r"://\S*@", f"://{MASK}@", text)
